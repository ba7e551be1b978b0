"""Every byte the engine owns, taken by name and counted by category."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_engine.blueprint import CATEGORIES
from zero_engine.comm import Buffer, Comm
from zero_engine.pages import host_memory


class Arenas:
    """Allocations of one rank. Nothing else in the engine calls the allocator for memory that outlives a call."""

    fresh_byte = 0  # what fresh memory holds; tests put 0xFF here (a NaN in every float type)

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self._bytes = dict.fromkeys(CATEGORIES, 0)

    def take(self, category: str, num_bytes: int) -> Tensor:
        """Private memory: 1-D uint8, contents unspecified."""
        self._bytes[category] += num_bytes
        if self._device.type != "cpu":
            return torch.full((num_bytes,), self.fresh_byte, dtype=torch.uint8, device=self._device)
        return host_memory(num_bytes).fill_(self.fresh_byte)

    def pin(self, num_bytes: int) -> Tensor:
        """Host memory that a GPU copies to and from at full speed; on a CPU, memory as any other."""
        self._bytes["pinned"] = self._bytes.get("pinned", 0) + num_bytes
        memory = torch.full((num_bytes,), self.fresh_byte, dtype=torch.uint8)
        return memory.pin_memory() if self._device.type == "cuda" else memory

    def share(self, category: str, label: str, sizes: Sequence[int]) -> Buffer:
        """Memory that other ranks read; a collective call. Contents unspecified."""
        self._bytes[category] += sizes[self._comm.rank]
        buffer = self._comm.allocate(label, sizes)
        if self.fresh_byte:
            buffer.local.fill_(self.fresh_byte)
        return buffer

    def memory(self) -> dict[str, int]:
        """Bytes by category."""
        return dict(self._bytes)
