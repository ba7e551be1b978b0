"""Where a step's time and memory go: exclusive seconds and peak bytes by phase, and the same as a Chrome trace."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_engine.comm import Transfer
from zero_engine.memory_meter import MemoryMeter

PHASES = ("forward", "backward", "reduce", "update", "gather")


@dataclass(frozen=True)
class Event:
    """One uninterrupted piece of a phase; seconds of the monotonic clock, which all processes of a machine share."""

    phase: str
    start: float
    seconds: float


@dataclass(frozen=True)
class _Block:
    """Entered for every unit: made once, and a class, which takes half as long as a generator."""

    clock: PhaseClock
    phase: str

    def __enter__(self) -> None:
        self.clock.enter(self.phase)

    def __exit__(self, *_: object) -> None:
        self.clock.leave()


class PhaseClock:
    """A stack of phases; the time of an inner phase does not count for the outer one."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._blocks = {phase: _Block(self, phase) for phase in PHASES}
        self._stack: list[str] = []
        self._mark = 0.0
        self._events: list[Event] | None = None
        self._meter: MemoryMeter | None = None
        self._peaks: dict[str, int] = {}  # bytes by phase

    def enter(self, phase: str) -> None:
        """`phase` begins."""
        self._book()
        self._stack.append(phase)

    def leave(self) -> None:
        """The innermost phase is over."""
        self._book()
        self._stack.pop()

    def phase(self, phase: str) -> AbstractContextManager[None]:
        """The block is one phase."""
        return self._blocks[phase]

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call; every open phase ends."""
        self._book()
        self._stack.clear()
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return seconds

    def record(self) -> None:
        """Keep events from now on."""
        self._events = []

    def recorded(self) -> list[Event]:
        """The events kept; recording ends."""
        events, self._events = self._events or [], None
        return events

    def watch(self, meter: MemoryMeter) -> None:
        """Read `meter` at every change of phase from now on."""
        self._meter, self._peaks = meter, dict.fromkeys(PHASES, 0)
        meter.start()

    def watched(self) -> dict[str, int]:
        """The most bytes in each phase; watching ends. Empty when nothing was watched."""
        meter, self._meter = self._meter, None
        peaks, self._peaks = self._peaks, {}
        if meter is not None:
            meter.stop()
        return peaks

    def _book(self) -> None:
        now = time.perf_counter()
        if self._stack:
            phase = self._stack[-1]
            self._seconds[phase] += now - self._mark
            if self._events is not None:
                self._events.append(Event(phase, self._mark, now - self._mark))
            if self._meter is not None:
                self._peaks[phase] = max(self._peaks[phase], self._meter.peak())
        self._mark = now


def write_trace(
    path: str | os.PathLike[str], rank: int, events: Sequence[Event], transfers: Sequence[Transfer]
) -> None:
    """A file for chrome://tracing or Perfetto; "{rank}" in the path is replaced, so that every rank has its own.

    Phases stand on one line of a rank; each message on a line of its own from its start to its arrival, with the part
    of it that nobody waited for.
    """
    rows: list[dict[str, Any]] = [
        {"name": e.phase, "ph": "X", "ts": 1e6 * e.start, "dur": 1e6 * e.seconds, "pid": rank, "tid": 0} for e in events
    ]
    for number, each in enumerate(transfers):
        row = {"name": each.key, "cat": "communication", "id": number, "pid": rank, "tid": 1}
        hidden = {"hidden_us": 1e6 * (each.waited - each.begun)}
        rows += [
            {**row, "ph": "b", "ts": 1e6 * each.begun, "args": hidden},
            {**row, "ph": "e", "ts": 1e6 * each.done},
        ]
    target = Path(str(path).replace("{rank}", str(rank)))
    target.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))
