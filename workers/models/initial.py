"""The first bits of every parameter of our models: a function of the seed and the parameter's name, nothing else.

So a parameter starts the same whoever builds it, in whatever order, alone or with the rest of the model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

GPT_DEVIATION = 0.02

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


def _is_norm(name: str) -> bool:
    return name.rsplit(".", 2)[-2].startswith("ln_")


def _normal(parameter: Tensor, seed: int, name: str, deviation: float) -> None:
    parameter.normal_(0.0, deviation, generator=generator_for(seed, name))
