"""Copies between a device and pinned host memory that go on while both compute.

A copy takes place at any moment between its `begin` and its ticket's `wait` (or a `fence`); until then nobody writes
its source or touches its target. That is all a caller may count on: tests take both ends of it, each copy at once and
each as late as it may be, and compare the bits.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Ticket(Protocol):
    """One copy."""

    def wait(self) -> None:
        """The host goes on when the target is written and the source is free again."""


class Copies(Protocol):
    """Copies in the order in which they are begun, each way."""

    def begin(self, target: Tensor, source: Tensor) -> Ticket:
        """Copy, after what the device has been told to compute so far. Same dtype; host tensors are pinned."""

    def fence(self) -> None:
        """What the device is told to compute from now on comes after the copies begun so far; the host goes on."""


class Done:
    """The ticket of a copy that took place at once."""

    def wait(self) -> None:
        """It is over."""


class AtOnce:
    """Each copy in its turn, the host waiting: all there is on a CPU."""

    def begin(self, target: Tensor, source: Tensor) -> Ticket:
        target.copy_(source)
        return Done()

    def fence(self) -> None:
        """Nothing is under way."""


class OnStreams:
    """One CUDA stream each way, so that both copy engines of a GPU work beside its kernels."""

    def __init__(self, device: torch.device) -> None:
        stream: Any = torch.cuda.Stream
        self._device, self._out, self._back = device, stream(device), stream(device)

    def begin(self, target: Tensor, source: Tensor) -> Ticket:
        stream = self._back if target.is_cuda else self._out
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return Recorded(stream.record_event())

    def fence(self) -> None:
        for stream in (self._out, self._back):
            torch.cuda.current_stream(self._device).wait_stream(stream)


class Recorded:
    """The ticket of a copy on a stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


def copies_of(device: torch.device) -> Copies:
    """What a rank on this device copies with."""
    return OnStreams(device) if device.type == "cuda" else AtOnce()
