"""Copies that take place as late as they may, or at any moment in between: what a busy bus does, without one.

Between its beginning and its wait a copy's target holds NaN, and what its source holds at the moment of the copy is
what arrives: whoever reads or writes too early changes bits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

import zero_engine.strategy
from zero_engine import blueprint

STRIDE = 512  # elements: several to a unit


class LateCopy:
    """One copy that has not taken place."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        assert target.dtype == source.dtype and target.shape == source.shape
        self._target, self._source, self._done = target, source, False
        target.fill_(torch.nan)

    def wait(self) -> None:
        if not self._done:
            self._target.copy_(self._source)
            self._done = True


class LateCopies:
    """`chance`: of each waiting copy to take place whenever another one begins; 0: as late as it may."""

    def __init__(self, chance: float, seed: int) -> None:
        self.begun = self.most = 0
        self._chance, self._random = chance, random.Random(seed)
        self._waiting: list[LateCopy] = []

    def begin(self, target: Tensor, source: Tensor) -> LateCopy:
        copy = LateCopy(target, source)
        self._waiting = [each for each in self._waiting if not each._done]
        for each in self._waiting:
            if self._random.random() < self._chance:
                each.wait()
        self._waiting.append(copy)
        self.begun, self.most = self.begun + 1, max(self.most, len(self._waiting))
        return copy

    def fence(self) -> None:
        for each in self._waiting:
            each.wait()


@contextmanager
def over_a_bus(chance: float, seed: int = 0) -> Iterator[list[LateCopies]]:
    """Engines built inside offload as on a GPU, in small strides over a bus that is late; their copies are given."""
    made: list[LateCopies] = []

    def late(device: torch.device) -> LateCopies:
        made.append(LateCopies(chance, seed))
        return made[-1]

    with (
        patch.object(zero_engine.strategy, "copies_of", late),
        patch.dict(blueprint.BUS, {"cpu": True}),
        patch.dict(blueprint.STRIDE, {"cpu": STRIDE}),
    ):
        yield made
