"""A shard's worth of shared memory: the rank copies into it, the writer process reads from it, again and again."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from zero_engine.reshard import Run
from zero_engine.shard import BUFFER
from zero_engine.state import DTYPES, Subject, block_bytes
from zero_engine.writer import Placed, PlacedName

COPY_ELEMENTS = 4 << 20  # copied in one call; between calls the interpreter lock is free for the training thread
ALIGNMENT = 64  # bytes: where each piece begins

Staged = tuple[PlacedName, ...]


class HostCopies:
    """Copies between host tensors; they are done when the call returns."""

    def mark(self) -> None:
        """The state is complete: the training thread says so."""

    def run(self, source: Tensor, target: Tensor) -> None:
        """Copy a 1-D tensor in pieces."""
        for start in range(0, source.numel(), COPY_ELEMENTS):
            target[start : start + COPY_ELEMENTS].copy_(source[start : start + COPY_ELEMENTS])

    def wait(self) -> None:
        """All copies are done."""


class DeviceCopies:
    """Copies from a GPU into pinned memory on a stream of their own, beside the kernels of the next forward."""

    def __init__(self, device: torch.device, memory: Tensor) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        self.mark()

    def mark(self) -> None:
        self._ready = torch.cuda.current_stream(self._device).record_event()

    def run(self, source: Tensor, target: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        self._stream.synchronize()


class SharedCopy:
    """Memory of the sizes that a rank's state has; the state keeps its sizes, so nothing is ever allocated again."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._buffers_start = sum(map(_room, (tensor for _, tensor in subject.owned())))
        self.num_bytes = max(1, self._buffers_start + sum(map(_room, self._own_buffers().values())))
        self.descriptor = os.memfd_create("shardyard-checkpoint", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, self.num_bytes)
        self._map = mmap.mmap(self.descriptor, self.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        on_host = subject.device.type == "cpu"
        self._copies = HostCopies() if on_host else DeviceCopies(subject.device, self._memory)

    def take(self, state: Iterable[tuple[Run, Tensor]]) -> list[tuple[Run, Tensor]]:
        """Copy every tensor; the same runs with their copies (1-D)."""
        copies, offset = list[tuple[Run, Tensor]](), 0
        for run, tensor in state:
            copies.append((run, self._copy(tensor.detach(), offset)))
            offset += _room(tensor)
        self._copies.wait()
        return copies

    def take_buffers(self) -> Staged:
        """Copy the module's buffers, which the next forward may change; only rank 0 saves them.

        Called by the training thread when the state to save is complete.
        """
        self._copies.mark()
        staged, offset = list[PlacedName](), self._buffers_start
        for name, buffer in self._own_buffers().items():
            copy = self._copy(buffer.detach().reshape(-1), offset)
            size = copy.numel() * copy.element_size()
            staged.append(PlacedName(BUFFER + name, DTYPES[buffer.dtype], tuple(buffer.shape), offset, size))
            offset += _room(buffer)
        self._copies.wait()
        return tuple(staged)

    def places(self, copies: Iterable[tuple[Run, Tensor]]) -> tuple[Placed, ...]:
        """Where copies stand, for the writer."""
        return tuple(
            Placed(
                kind=run.kind,
                dtype=DTYPES[copy.dtype],
                first=run.first,
                block_bytes=block_bytes(self._subject.layout, copy),
                offset=copy.data_ptr() - self._memory.data_ptr(),
                num_bytes=copy.numel() * copy.element_size(),
            )
            for run, copy in copies
        )

    def close(self) -> None:
        """Give the memory back; no copy may be used afterwards."""
        os.close(self.descriptor)

    def _own_buffers(self) -> dict[str, Tensor]:
        return self._subject.buffers() if self._subject.comm.rank == 0 else {}

    def _copy(self, tensor: Tensor, offset: int) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        target = self._memory[offset : offset + size].view(tensor.dtype)
        self._copies.run(tensor, target)
        return target


def _room(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return -(-size // ALIGNMENT) * ALIGNMENT
