"""A float in the database: a finite value, or a null with a flag that says which non-finite it was."""

from __future__ import annotations

import math

from server.models import FINITE, NAN, NEGATIVE_INFINITY, POSITIVE_INFINITY

_BACK: dict[int, float] = {NAN: math.nan, POSITIVE_INFINITY: math.inf, NEGATIVE_INFINITY: -math.inf}


def split(value: float | None) -> tuple[float | None, int]:
    """(value, flag) as stored; None stays an absent value."""
    if value is None or math.isfinite(value):
        return value, FINITE
    if math.isnan(value):
        return None, NAN
    return None, POSITIVE_INFINITY if value > 0 else NEGATIVE_INFINITY


def join(value: float | None, flag: int) -> float | None:
    """The number that was stored; None when there was none."""
    return _BACK.get(flag, value)
