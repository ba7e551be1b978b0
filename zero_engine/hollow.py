"""A model on the meta device becomes one on a real device that still holds nothing: the objects, ties and shapes stay.

Note: why `swap_tensors`. Optimizer groups, ties and hooks hold the Parameter itself, and torch forbids setting the data
of a meta tensor to that of a real one. Swapping puts real contents into the same Python object; one element that is
seen in the whole shape stands in until the engine's own memory takes its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_engine.errors import ModelError


@dataclass(frozen=True)
class Hollowed:
    """What a model on the meta device says about how it was built."""

    writes: dict[str, int]  # by parameter name: how often its constructor wrote it
    buffers: tuple[str, ...]  # names of buffers that were on the meta device and hold nothing yet


def is_meta(model: nn.Module) -> bool:
    """Whether all parameters are on the meta device. Raises ModelError when only some are."""
    places = {parameter.is_meta for parameter in model.parameters()}
    if len(places) > 1:
        names = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        raise ModelError(f"parameter '{names[0]}' is on the meta device and others are not; build all of them there")
    return places == {True}


def hollow(model: nn.Module, device: torch.device) -> Hollowed:
    """Parameters become real tensors without memory, buffers get memory on `device`. Raises ModelError for a tensor
    on the meta device that is neither.
    """
    stray = next(stray_tensors(model), None)
    if stray is not None:
        raise ModelError(f"{stray} is a tensor on the meta device; register it as a buffer, or build it elsewhere")
    writes = {name: parameter._version for name, parameter in model.named_parameters()}
    buffers = tuple(name for name, buffer in model.named_buffers() if buffer.is_meta)
    for parameter in model.parameters():
        seen = torch.empty((), dtype=parameter.dtype, device=device).expand(parameter.shape)
        torch.utils.swap_tensors(parameter, nn.Parameter(seen, parameter.requires_grad))  # type: ignore[no-untyped-call]
    return Hollowed(writes, buffers)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers stand on `device`, those of the meta device without contents; shared ones stay shared."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                place = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                module._buffers[name] = moved.setdefault(id(buffer), place)


def stray_tensors(model: nn.Module) -> Iterator[str]:
    """Attributes of modules, in words, that hold tensors on the meta device and are no parameters or buffers."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_buffers", "_modules") and any(_meta_in(value)):
                yield f"attribute '{attribute}' of module '{name or 'the model itself'}'"


def _meta_in(value: Any) -> Iterator[bool]:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        yield value.is_meta
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _meta_in(item)
    elif isinstance(value, dict):
        yield from _meta_in(list(value.values()))
