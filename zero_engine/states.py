"""Where masters and moments stand and where the update runs: on the device, or in host memory."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from zero_engine.arenas import Arenas


class StateHome(Protocol):
    """Memory for masters and moments, and a stride of scaled gradients beside it."""

    def masters(self, elements: int) -> Tensor:
        """1-D fp32."""

    def moments(self, elements: int) -> Tensor:
        """1-D fp32, zero."""

    def scaled(self, sums: Tensor, scale: float) -> Tensor:
        """`sums` x `scale` where the update runs; valid until the next call."""


class OnDevice:
    """No offload."""

    def __init__(self, arenas: Arenas, scratch: Tensor) -> None:
        self._arenas, self._scratch = arenas, scratch

    def masters(self, elements: int) -> Tensor:
        return self._arenas.take("master", 4 * elements).view(torch.float32)

    def moments(self, elements: int) -> Tensor:
        return self._arenas.take("moments", 4 * elements).view(torch.float32).zero_()

    def scaled(self, sums: Tensor, scale: float) -> Tensor:
        return torch.mul(sums, scale, out=self._scratch[: len(sums)])


class OnHost:
    """Masters and moments in pinned memory. Sums come over a stride at a time; updated weights go back the same way.

    On a CPU it is the same path with the same bits, and one more copy of the weights.
    """

    def __init__(self, arenas: Arenas, stride: int) -> None:
        self._arenas = arenas
        self._scratch = arenas.pin(4 * stride).view(torch.float32)

    def masters(self, elements: int) -> Tensor:
        return self._arenas.pin(4 * elements).view(torch.float32)

    def moments(self, elements: int) -> Tensor:
        return self._arenas.pin(4 * elements).view(torch.float32).zero_()

    def scaled(self, sums: Tensor, scale: float) -> Tensor:
        return self._scratch[: len(sums)].copy_(sums).mul_(scale)
