"""The loss curve the size of a word that lists show. Pure.

Note: why the steps of a value double
With as many values as the whole job has room for, a job of a million steps showed one dot for its first hours. So a
value stands for one step at first; each time there is no more room, two neighbours become one. A curve that has begun
has between half of SPARKLINE_VALUES and all of them, however long the job is.
"""

from __future__ import annotations

from dataclasses import dataclass

SPARKLINE_VALUES = 40


@dataclass(frozen=True)
class Sparkline:
    """At most SPARKLINE_VALUES values; value i is the last loss of steps i * stride + 1 to (i + 1) * stride."""

    values: tuple[float | None, ...]  # None: not finite, or no such step
    stride: int

    def after(self, step: int, loss: float | None) -> Sparkline:
        """With the loss of one more step; a step back, after a resume, cuts what was beyond it."""
        place = max(0, step - 1) // self.stride
        if place >= SPARKLINE_VALUES:
            return self._halved().after(step, loss)
        gap = (None,) * (place - len(self.values))
        return Sparkline((*self.values[:place], *gap, loss), self.stride)

    def _halved(self) -> Sparkline:
        """Of each two values the later one, which is the last of them that was written."""
        pairs = (self.values[index : index + 2] for index in range(0, len(self.values), 2))
        return Sparkline(tuple(pair[-1] for pair in pairs), self.stride * 2)
