"""Sees weights that were written behind the engine's back: its masters and shards would silently win over them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zero_engine.errors import UsageError
from zero_engine.standing import versions_of


class WeightWatch:
    """Compares autograd's version counters. The engine itself writes through flat views, which have counters apart."""

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self._parameters, self._names = parameters, names
        self.remember()

    def remember(self) -> None:
        """The weights are as the engine left them."""
        self._versions = self._now()

    def check(self) -> None:
        """Raises UsageError naming the first parameter that was written since."""
        now = self._now()
        if now != self._versions:
            changed = next(n for n, a, b in zip(self._names, now, self._versions, strict=True) if a != b)
            raise UsageError(
                f"the values of parameter '{changed}' were changed outside of a step, where the engine's own copy of "
                "them would win; load weights before the engine is built, or with engine.load_full_state_dict(state)"
            )

    def _now(self) -> list[int]:
        return versions_of(self._parameters)
