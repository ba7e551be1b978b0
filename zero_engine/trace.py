"""Where a step's time goes: exclusive seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("forward", "backward", "reduce", "update", "gather")


class PhaseClock:
    """A stack of phases; the time of an inner phase does not count for the outer one."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._stack: list[str] = []
        self._mark = 0.0

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

    def _book(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self._seconds[self._stack[-1]] += now - self._mark
        self._mark = now
