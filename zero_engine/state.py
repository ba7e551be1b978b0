"""What of an engine survives in a checkpoint: blocks by kind, buffers, scalars; seen as tensors and as bytes."""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_engine.adamw import Optimizer
from zero_engine.agree import Agreement
from zero_engine.comm import Comm
from zero_engine.config import ZeroConfig
from zero_engine.digest import counts_part, run_part
from zero_engine.layout import Layout, Piece, Range
from zero_engine.manifest import CheckpointError, Environment, Json
from zero_engine.master import Master
from zero_engine.reshard import FROZEN, MASTER, Run, runs_of

EXAMINED_ELEMENTS = 1 << 18  # looked at by both checks while they are in the processor's cache
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
"""torch dtypes by the name that safetensors gives them."""


class NonFiniteState(CheckpointError):
    """The state holds a NaN or an infinity: it is never saved as good."""

    code = "state_non_finite"


@dataclass(frozen=True)
class Subject:
    """The engine as a checkpoint sees it."""

    layout: Layout
    config: ZeroConfig  # resolved
    comm: Comm
    agreement: Agreement
    master: Master
    module: nn.Module
    optimizer: Optimizer
    device: torch.device
    frozen: Callable[[], Iterable[tuple[Piece, Tensor]]]  # frozen weights that this rank keeps beyond its own
    completed_steps: Callable[[], int]
    unlock: Callable[[], None]  # masters and weights may be written after
    loss_scale: Callable[[], Json]  # of fp16
    restore: Callable[[Json], None]  # they were written: take over the scalars

    @property
    def moments(self) -> tuple[str, ...]:
        return self.optimizer.moments

    @property
    def environment(self) -> Environment:
        """What the bits depend on beside the numbers."""
        cuda = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if cuda else self.device.type
        return Environment(name, str(torch.__version__), torch.get_num_threads())

    def owned(self) -> Iterator[tuple[Run, Tensor]]:
        """The blocks that this rank writes, in flat order, with their tensors (1-D)."""
        for piece in self.layout.pieces(self.comm.rank, self.comm.ranks):
            yield from self._state(piece)

    def held(self) -> Iterator[tuple[Run, Tensor]]:
        """The blocks that this rank must read: what it owns, and what it keeps beyond that without being sent it."""
        for piece in self.master.pieces:
            yield from self._state(piece)
        for piece, tensor in self.frozen():
            yield runs_of(self.layout, piece, self.moments)[0], tensor

    def scalars(self) -> Json:
        """The engine's own small state: plain numbers."""
        counts = list(self.master.steps)
        return {"completed_steps": self.completed_steps(), "counts": counts, "loss_scale": self.loss_scale()}

    def digest_part(self, state: Iterable[tuple[Run, Tensor]], scalars: Json) -> int:
        """This rank's part of the engine's digest, of the blocks it owns as they stand in `state`.

        Raises NonFiniteState naming the parameter when a value is not finite.
        """
        total = 0
        if self.comm.rank == 0:
            total = counts_part(self.layout, scalars["counts"], scalars["completed_steps"])
        for run, tensor in state:
            first = run.first * self.layout.block
            number = self._run_at(first)
            kind = "parameter" if run.kind in (MASTER, FROZEN) else run.kind
            for start in range(0, tensor.numel(), EXAMINED_ELEMENTS):
                part = tensor[start : start + EXAMINED_ELEMENTS]
                require_finite(self.layout, run.kind, first + start, part)
                place = Range(first + start, first + start + part.numel())
                total += run_part(self.layout, kind, number, place, part)
        return total % 2**64

    def _run_at(self, element: int) -> int:
        """Number of the layout's run that holds a flat element."""
        return bisect_right([run.start for run in self.layout.runs], element) - 1

    def buffers(self) -> dict[str, Tensor]:
        """Module buffers that belong to the model's state, by canonical name."""
        found = {}
        for prefix, module in self.module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    found[f"{prefix}.{name}" if prefix else name] = buffer
        return found

    def _state(self, piece: Piece) -> Iterator[tuple[Run, Tensor]]:
        tensors = self.master.tensors(piece.run, piece.range)
        for run in runs_of(self.layout, piece, self.moments):
            yield run, tensors["parameter" if run.kind in (MASTER, FROZEN) else run.kind]


def block_bytes(layout: Layout, tensor: Tensor) -> int:
    """Bytes of a block of this tensor's dtype."""
    return layout.block * tensor.element_size()


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable. The view keeps the tensor alive."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    count = tensor.numel() * tensor.element_size()
    if not count:
        return memoryview(b"")
    memory: Any = (ctypes.c_char * count).from_address(tensor.data_ptr())
    memory.owner = tensor
    return memoryview(memory).cast("B")


def require_finite(layout: Layout, kind: str, first: int, values: Tensor) -> None:
    """Raises NonFiniteState naming the parameter when one of the flat elements from `first` on is not finite."""
    if not values.is_floating_point() or math.isfinite(values.sum(dtype=torch.float32).item()):
        return
    bad = torch.isfinite(values).logical_not_().nonzero()  # a sum may overflow where no value does
    if len(bad):
        name = _parameter_at(layout, first + int(bad[0]))
        raise NonFiniteState(f"{kind} of parameter '{name}' is not finite: the state is not saved")


def _parameter_at(layout: Layout, element: int) -> str:
    near = Range(element, element + 1)
    return next((entry.spec.name for entry in layout.entries if len(entry.range.meet(near))), "padding")
