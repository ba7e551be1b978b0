"""First values of a model from its modules' `reset_parameters`, each under a generator of its own.

What a parameter starts as is a function of (seed, name of its module, shape): the same whoever makes it, alone, with
the rest of its unit, or with the whole model (`initialise`). A tied parameter starts as the module of its first name
makes it. Nothing that a module draws depends on another module.

Note: why completeness is tried and not trusted. A module is given fresh memory full of NaN (a count of writes where
the dtype has none) and asked to reset itself; what is left tells which parameter or buffer it forgot. That is the only
way to see it: such a module works when built on the CPU, where its constructor wrote the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero_engine.errors import ModelError


@dataclass(frozen=True)
class Own:
    """Values of what a module itself owns, on the CPU, by local name; and how often each parameter was written."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    writes: dict[str, int]


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> nn.Module:
    """Give a built model the values that an engine with this seed gives its twin on the meta device; returns it.

    Raises ModelError naming the first module without a complete `reset_parameters`.
    """
    done = set[int]()
    for name, module in model.named_modules():
        own = values_of(module, name, seed)
        for local, value in own.parameters.items():
            if id(module._parameters[local]) not in done:
                done.add(id(module._parameters[local]))
                model.get_parameter(_joined(name, local)).copy_(value)
        for local, value in own.buffers.items():
            model.get_buffer(_joined(name, local)).copy_(value)
    return model


@torch.no_grad()
def values_of(module: nn.Module, name: str, seed: int) -> Own:
    """Run the module's `reset_parameters` on fresh memory. The module keeps what it has.

    Raises ModelError when it has none, when that does not write everything, or when it reaches into another module.
    """
    parameters, buffers = _present(module._parameters), _present(module._buffers)
    if not parameters and not buffers:
        return Own({}, {}, {})
    method = getattr(module, "reset_parameters", None)
    if method is None:
        raise _refusal(module, name, sorted([*parameters, *buffers]), "has no reset_parameters")
    fresh = {local: nn.Parameter(_unwritten(each), each.requires_grad) for local, each in parameters.items()}
    memory = {local: _unwritten(each) for local, each in buffers.items()}
    before = {local: tensor._version for local, tensor in (fresh | memory).items()}
    others = [parameter for child in module.children() for parameter in child.parameters()]
    versions = [parameter._version for parameter in others]
    with _holding(module, fresh, memory) as held, generator_of(seed, name):
        try:
            method()
        except RuntimeError as error:
            raise _refusal(module, name, sorted(fresh), f"has a reset_parameters that fails here ({error})") from error
        writes = {local: _writes(held[local], before[local], (fresh | memory)[local]) for local in before}
    if versions != [parameter._version for parameter in others]:
        raise _refusal(module, name, sorted(fresh), "has a reset_parameters that writes to other modules")
    forgotten = [local for local, value in held.items() if not _is_written(value, writes[local])]
    if forgotten:
        raise _refusal(module, name, forgotten, "has a reset_parameters that does not write them all")
    values = {local: value.detach() for local, value in held.items()}
    return Own({local: values[local] for local in fresh}, {local: values[local] for local in memory}, writes)


@contextmanager
def generator_of(seed: int, name: str) -> Iterator[None]:
    """torch's CPU generator as a function of (seed, name) inside the block, and as it was after it."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


@contextmanager
def _holding(
    module: nn.Module, parameters: dict[str, nn.Parameter], buffers: dict[str, Tensor]
) -> Iterator[dict[str, Tensor]]:
    """The module owns these inside the block; what it owns at the end of it is added to the result."""
    kept = module.__dict__["_parameters"], module.__dict__["_buffers"]
    empty = {local: None for own in kept for local, value in own.items() if value is None}
    held: dict[str, Tensor] = {**parameters, **buffers}
    module.__dict__["_parameters"] = {local: parameters.get(local, empty.get(local)) for local in kept[0]}
    module.__dict__["_buffers"] = {local: buffers.get(local, empty.get(local)) for local in kept[1]}
    try:
        yield held
        held |= _present(module._parameters) | _present(module._buffers)
    finally:
        module.__dict__["_parameters"], module.__dict__["_buffers"] = kept


def _present(own: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {local: tensor for local, tensor in own.items() if tensor is not None}


def _unwritten(like: Tensor) -> Tensor:
    memory = torch.empty(like.shape, dtype=like.dtype)
    return memory.fill_(torch.nan) if like.is_floating_point() else memory


def _writes(value: Tensor, before: int, given: Tensor) -> int:
    return value._version - before if value is given else 1  # replaced by a new tensor


def _is_written(value: Tensor, writes: int) -> bool:
    if not value.is_floating_point():
        return writes > 0 or not value.numel()
    return not bool(value.isnan().any())


def _joined(name: str, local: str) -> str:
    return f"{name}.{local}" if name else local


def _refusal(module: nn.Module, name: str, locals_: list[str], what: str) -> ModelError:
    owned = ", ".join(f"'{_joined(name, local)}'" for local in locals_)
    return ModelError(
        f"module '{name or 'the model itself'}' ({type(module).__name__}) owns {owned} and {what}, so a model on the "
        "meta device cannot start; write one that sets all of them, pass Engine(initial=...), or build the model on "
        "the CPU on rank 0 alone: it is sent to the ranks whose model is on the meta device"
    )
