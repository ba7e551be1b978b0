"""The first bits of every parameter of our models: a function of the seed and the parameter's name, nothing else.

So a parameter starts the same whoever builds it, in whatever order, alone or with the rest of the model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.transformers_folder import WEIGHTS_FILE, own_name

GPT_DEVIATION = 0.02


class StartError(ValueError):
    """The folder that a spec begins with does not fit it."""

    code = "spec_invalid"


Values = Callable[[str, Tensor], None]  # writes the first values of one parameter, by its name


def generator_for(seed: int, name: str) -> torch.Generator:
    """A CPU generator of its own for one parameter."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def gpt_values(seed: int, layers: int) -> Values:
    """GPT-2's: normal weights, those that write to the residual stream times 1 / sqrt(2 layers); norms 1, biases 0."""

    def write(name: str, parameter: Tensor) -> None:
        if name.endswith("bias"):
            parameter.zero_()
        elif _is_norm(name):
            parameter.fill_(1.0)
        else:
            scale = 1 / math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 1.0
            _normal(parameter, seed, name, GPT_DEVIATION * scale)

    return write


def mlp_values(seed: int) -> Values:
    """He et al. 2015: weights of variance 2 / inputs, biases zero."""

    def write(name: str, parameter: Tensor) -> None:
        if name.endswith("bias"):
            parameter.zero_()
        else:
            _normal(parameter, seed, name, math.sqrt(2 / parameter.shape[1]))

    return write


def folder_values(folder: Path) -> Values:
    """Those of a folder that `transformers` wrote, one tensor at a time. Raises StartError when one does not fit."""
    file = folder / WEIGHTS_FILE
    try:
        tensors: Any = safe_open(file, framework="pt")
        found: list[str] = tensors.keys()
        names = {own_name(name): name for name in found}
    except (OSError, SafetensorError) as error:
        raise StartError(f"model.start {file} cannot be read: {error}") from error

    def write(name: str, parameter: Tensor) -> None:
        if name not in names:
            raise StartError(f"model.start {file} has no {name}")
        value = tensors.get_tensor(names[name])
        if value.shape != parameter.shape:
            raise StartError(
                f"model.start: {name} is {list(value.shape)} in {file}, {list(parameter.shape)} by the spec"
            )
        parameter.copy_(value)

    return write


def _is_norm(name: str) -> bool:
    return name.rsplit(".", 2)[-2].startswith("ln_")


def _normal(parameter: Tensor, seed: int, name: str, deviation: float) -> None:
    parameter.normal_(0.0, deviation, generator=generator_for(seed, name))
