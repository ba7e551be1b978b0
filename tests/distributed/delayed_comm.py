"""A transport whose every operation comes late, by a seeded amount of its own on each rank.

What it injects is time: a rank falls behind inside a cycle, bytes arrive long after they were asked for, and the
owner of a buffer is ready to write again while others still read. No test waits for anything with it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

import zero_engine.engine
from zero_engine.comm import Arrival, Buffer, Comm, Exchange, Gather
from zero_engine.layout import Range

MOST_SECONDS = 0.002


class LateArrival:
    """Bytes that are asked for late, and there even later."""

    def __init__(self, arrival: Arrival, late: Callable[[], AbstractContextManager[None]]) -> None:
        self._arrival, self._late = arrival, late

    def wait(self) -> None:
        with self._late():
            self._arrival.wait()


class DelayedComm:
    """Another `Comm`, late before and after each of its operations, and between the slices of an exchange."""

    def __init__(self, comm: Comm, seed: int) -> None:
        self._comm, self._random = comm, random.Random(1000 * seed + comm.rank)
        self.late = 0  # operations that came late

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    @contextmanager
    def _late(self) -> Iterator[None]:
        time.sleep(self._random.random() * MOST_SECONDS)
        yield
        time.sleep(self._random.random() * MOST_SECONDS)
        self.late += 1

    def reclaim(self, buffer: Buffer) -> None:
        with self._late():
            self._comm.reclaim(buffer)

    def publish(self, buffer: Buffer, label: str) -> None:
        with self._late():
            self._comm.publish(buffer, label)

    def exchange(self, buffer: Buffer, request: Exchange, purpose: str) -> Iterator[tuple[Range, list[Tensor | None]]]:
        with self._late():
            return self._slowly(self._comm.exchange(buffer, request, purpose))

    def _slowly(
        self, arriving: Iterator[tuple[Range, list[Tensor | None]]]
    ) -> Iterator[tuple[Range, list[Tensor | None]]]:
        for part in arriving:
            time.sleep(self._random.random() * MOST_SECONDS)
            yield part

    def fetch(self, buffer: Buffer, request: Gather, target: Tensor, purpose: str) -> LateArrival:
        with self._late():
            return LateArrival(self._comm.fetch(buffer, request, target, purpose), self._late)

    def gather(self, buffer: Buffer, request: Gather, target: Tensor, purpose: str) -> None:
        with self._late():
            self._comm.gather(buffer, request, target, purpose)

    def release(self, buffer: Buffer) -> None:
        with self._late():
            self._comm.release(buffer)


@contextmanager
def delays(seed: int, last_alone: bool = False) -> Iterator[list[DelayedComm]]:
    """Engines built inside the block communicate late, or those of the last rank; their transports are in the list."""
    made: list[DelayedComm] = []
    connect = zero_engine.engine.comm_between

    def connect_late(*args: Any) -> Comm:
        comm: Any = connect(*args)
        if not last_alone or comm.rank + 1 == comm.ranks:
            comm = DelayedComm(comm, seed)
            made.append(comm)
        return comm  # type: ignore[no-any-return]

    with patch.object(zero_engine.engine, "comm_between", connect_late):
        yield made
