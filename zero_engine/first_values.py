"""Where first values of parameters come from: they were built here, are made unit by unit, or another rank has them.

An engine takes one unit at a time and keeps only what this rank owns of it, so that at most one unit is held whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from zero_engine.comm import Comm, Gather
from zero_engine.digest import tensor_part
from zero_engine.errors import ModelError
from zero_engine.group import require_equal
from zero_engine.layout import ALIGNMENT, ITEM_BYTES, Entry, Layout, Range
from zero_engine.reset import values_of

ValueOf = Callable[[Entry], Tensor]
Initial = Callable[[str, Tensor], None]  # (name, CPU tensor of its shape and dtype): writes the first values


class FirstValues(Protocol):
    """Asked for every unit in order, once."""

    def of(self, unit: int) -> ValueOf:
        """Values of a unit's parameters in their shapes and declared dtypes; collective where another rank has them.
        Valid until the next call.
        """

    def finish(self) -> None:
        """Every unit was taken; collective."""


class Built:
    """The parameters have their values."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def of(self, unit: int) -> ValueOf:
        return lambda entry: self._parameters[entry.ordinal]

    def finish(self) -> None:
        """They were compared before."""


class Made:
    """Every rank makes the values of a unit, keeps its part, and compares what it made with the others."""

    def __init__(self, comm: Comm, layout: Layout, make: ByModule | ByName, device: torch.device) -> None:
        self._comm, self._layout, self._make, self._device = comm, layout, make, device
        self._parts: dict[int, int] = {}

    def of(self, unit: int) -> ValueOf:
        values = self._make(self._layout.entries_of(unit))
        for ordinal, value in values.items():
            self._parts[ordinal] = tensor_part("initial", ordinal, 0, value.reshape(-1))
        return lambda entry: values[entry.ordinal]

    def finish(self) -> None:
        """Raises DivergedError naming the first parameter that two ranks made differently (torch builds, say)."""
        parts = [self._parts[entry.ordinal] for entry in self._layout.canonical_entries]
        require_equal(self._comm, self._layout, parts, self._device)


class ByModule:
    """Makes values with the `reset_parameters` of the module that owns a parameter's first name."""

    def __init__(self, model: nn.Module, seed: int, writes: Mapping[str, int]) -> None:
        self._model, self._seed, self._writes = model, seed, writes

    def __call__(self, entries: Sequence[Entry]) -> Mapping[int, Tensor]:
        """By parameter number. Raises ModelError for an incomplete `reset_parameters`, and where the constructor wrote
        a parameter again after it.
        """
        found: dict[int, Tensor] = {}
        for path in dict.fromkeys(_path(entry) for entry in entries):
            own = values_of(self._model.get_submodule(path), path, self._seed)
            for entry in (entry for entry in entries if _path(entry) == path):
                local = entry.spec.name.rpartition(".")[2]
                self._check(entry.spec.name, own.writes[local])
                found[entry.ordinal] = own.parameters[local]
        return found

    def _check(self, name: str, writes: int) -> None:
        if self._writes[name] > writes:
            raise ModelError(
                f"parameter '{name}' was written {self._writes[name]} times when the model was built and "
                f"reset_parameters writes it {writes} times: the model starts it in a way of its own. Pass "
                "Engine(initial=...), or build the model on the CPU on rank 0 alone and on the meta device elsewhere"
            )

    def fill_buffers(self, names: Sequence[str]) -> None:
        """Write these buffers of the model. Raises ModelError where `reset_parameters` does not."""
        for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
            own = values_of(self._model.get_submodule(path), path, self._seed)
            for name in (name for name in names if name.rpartition(".")[0] == path):
                self._model.get_buffer(name).copy_(own.buffers[name.rpartition(".")[2]])


class ByName:
    """Makes values with a function of the caller's own."""

    def __init__(self, model: nn.Module, initial: Initial) -> None:
        self._model, self._initial = model, initial

    @torch.no_grad()
    def __call__(self, entries: Sequence[Entry]) -> Mapping[int, Tensor]:
        """By parameter number."""
        found: dict[int, Tensor] = {}
        for entry in entries:
            found[entry.ordinal] = torch.zeros(entry.spec.shape, dtype=getattr(torch, entry.spec.dtype))
            self._initial(entry.spec.name, found[entry.ordinal])
        return found

    @torch.no_grad()
    def fill_buffers(self, names: Sequence[str]) -> None:
        """Write these buffers of the model."""
        for name in names:
            buffer = self._model.get_buffer(name)
            value = torch.zeros_like(buffer, device="cpu")
            self._initial(name, value)
            buffer.copy_(value)


class Sent:
    """One rank has the values and sends them unit by unit; the others hold a unit at a time."""

    def __init__(
        self, comm: Comm, layout: Layout, source: int, parameters: Sequence[nn.Parameter], device: torch.device
    ) -> None:
        self.comm, self.layout, self._source, self._parameters = comm, layout, source, parameters
        largest = max(_places(layout.entries_of(unit.index))[1] for unit in layout.units)
        self._buffer = comm.allocate("first values", [largest if r == source else 0 for r in range(comm.ranks)])
        self._mine = self._buffer.local
        if comm.rank != source:
            self._mine = torch.empty(largest, dtype=torch.uint8, device=device)

    def of(self, unit: int) -> ValueOf:
        entries = self.layout.entries_of(unit)
        starts, size = _places(entries)
        self.comm.reclaim(self._buffer)
        if self.comm.rank == self._source:
            for entry in entries:
                self._view(entry, starts).copy_(self._parameters[entry.ordinal].detach())
        self.comm.publish(self._buffer, f"first values of unit {unit}")
        parts = tuple(Range(0, size if rank == self._source else 0) for rank in range(self.comm.ranks))
        self.comm.gather(self._buffer, Gather(parts, parts, f"first values of unit {unit}"), self._mine, "broadcast")
        self.comm.release(self._buffer)
        return lambda entry: self._view(entry, starts)

    def _view(self, entry: Entry, starts: Mapping[int, int]) -> Tensor:
        start, size = starts[entry.ordinal], entry.spec.numel * ITEM_BYTES[entry.spec.dtype]
        return self._mine[start : start + size].view(getattr(torch, entry.spec.dtype)).view(entry.spec.shape)

    def finish(self) -> None:
        """The memory that was sent from is free again."""
        self.comm.reclaim(self._buffer)


class SentOnNode:
    """One rank of each node has the values and sends them through its node's memory; all compare what they got."""

    def __init__(self, comm: Comm, sent: Sent, device: torch.device) -> None:
        self._comm, self._sent, self._device = comm, sent, device
        self._parts: dict[int, int] = {}

    def of(self, unit: int) -> ValueOf:
        value_of = self._sent.of(unit)
        for entry in self._sent.layout.entries_of(unit):
            self._parts[entry.ordinal] = tensor_part("initial", entry.ordinal, 0, value_of(entry).reshape(-1))
        return value_of

    def finish(self) -> None:
        """Raises DivergedError naming the first parameter that two nodes built differently."""
        self._sent.finish()
        self._sent.comm.close()
        parts = [self._parts[entry.ordinal] for entry in self._sent.layout.canonical_entries]
        require_equal(self._comm, self._sent.layout, parts, self._device)


def send_buffers(comm: Comm, model: nn.Module, source: int) -> None:
    """Every rank's buffers become those of `source`; collective."""
    for name, buffer in model.named_buffers():
        size = buffer.numel() * buffer.element_size()
        sent = comm.allocate("first buffer", [size if rank == source else 0 for rank in range(comm.ranks)])
        target = torch.empty(size, dtype=torch.uint8, device=buffer.device)
        if comm.rank == source:
            sent.local.copy_(buffer.detach().contiguous().reshape(-1).view(torch.uint8))
        comm.publish(sent, f"buffer {name}")
        parts = tuple(Range(0, size if rank == source else 0) for rank in range(comm.ranks))
        comm.gather(sent, Gather(parts, parts, f"buffer {name}"), target, "broadcast")
        comm.release(sent)
        comm.reclaim(sent)
        buffer.detach().copy_(target.view(buffer.dtype).view(buffer.shape))


def _places(entries: Sequence[Entry]) -> tuple[dict[int, int], int]:
    """First byte of each parameter of a unit in a message, by number, and the message's length."""
    starts, position = dict[int, int](), 0
    for entry in entries:
        starts[entry.ordinal] = position
        position += -(-entry.spec.numel * ITEM_BYTES[entry.spec.dtype] // (2 * ALIGNMENT)) * 2 * ALIGNMENT
    return starts, position


def _path(entry: Entry) -> str:
    return entry.spec.name.rpartition(".")[0]
