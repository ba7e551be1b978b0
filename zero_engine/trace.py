"""Where a step's time goes: exclusive seconds by phase, and the same as a Chrome trace."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PHASES = ("forward", "backward", "reduce", "update", "gather")


@dataclass(frozen=True)
class Event:
    """One uninterrupted piece of a phase; seconds of the monotonic clock, which all processes of a machine share."""

    phase: str
    start: float
    seconds: float


class PhaseClock:
    """A stack of phases; the time of an inner phase does not count for the outer one."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._stack: list[str] = []
        self._mark = 0.0
        self._events: list[Event] | None = None

    def enter(self, phase: str) -> None:
        """`phase` begins."""
        self._book()
        self._stack.append(phase)

    def leave(self) -> None:
        """The innermost phase is over."""
        self._book()
        self._stack.pop()

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """The block is one phase."""
        self.enter(phase)
        try:
            yield
        finally:
            self.leave()

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

    def _book(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self._seconds[self._stack[-1]] += now - self._mark
            if self._events is not None:
                self._events.append(Event(self._stack[-1], self._mark, now - self._mark))
        self._mark = now


def write_trace(path: str | os.PathLike[str], rank: int, events: list[Event]) -> None:
    """A file for chrome://tracing or Perfetto; "{rank}" in the path is replaced, so that every rank has its own."""
    rows = [
        {"name": e.phase, "ph": "X", "ts": 1e6 * e.start, "dur": 1e6 * e.seconds, "pid": rank, "tid": 0} for e in events
    ]
    target = Path(str(path).replace("{rank}", str(rank)))
    target.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))
