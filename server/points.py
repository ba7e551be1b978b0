"""Points of a series as arrays: the bytes of a sealed chunk, the merge of what overlaps, and rollups. Pure.

A chunk is zlib over three little-endian columns: steps and times as int64 differences, values as fp64 bits (NaN and the
infinities as they are). Rollups count 16**level steps a bucket, anchored at step 0, so that a bucket is the same
whatever was asked for before.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK_POINTS = 512
LEVELS = (1, 2, 3, 4, 5, 6)  # up to 16**6 = 16.8 M steps a bucket
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


class ChunkError(ValueError):
    """The bytes of a chunk are not what was written."""


@dataclass(frozen=True)
class Points:
    """Points sorted by step, each step once."""

    steps: Integers  # (n,)
    at_us: Integers  # (n,) microseconds since 1970, UTC
    values: Floats  # (n,) may be NaN or infinite

    def __len__(self) -> int:
        return len(self.steps)

    def between(self, first: int, last: int) -> Points:
        """Those with first <= step <= last."""
        low, high = np.searchsorted(self.steps, first), np.searchsorted(self.steps, last, side="right")
        return self.cut(int(low), int(high))

    def cut(self, start: int, stop: int) -> Points:
        """A run by position."""
        return Points(self.steps[start:stop], self.at_us[start:stop], self.values[start:stop])


NO_POINTS = Points(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float64))


def merge(parts: Sequence[Points]) -> Points:
    """All points of `parts` sorted by step; of one step the last part's wins."""
    parts = [part for part in parts if len(part)]
    if len(parts) <= 1:
        return parts[0] if parts else NO_POINTS
    steps = np.concatenate([part.steps for part in parts])
    order = np.argsort(steps, kind="stable")
    sorted_steps = steps[order]
    last = np.append(sorted_steps[1:] != sorted_steps[:-1], True)
    chosen = order[last]
    at_us = np.concatenate([part.at_us for part in parts])
    values = np.concatenate([part.values for part in parts])
    return Points(steps[chosen], at_us[chosen], values[chosen])


def pack(points: Points) -> bytes:
    """The bytes of a chunk."""
    steps = np.diff(points.steps, prepend=np.int64(0)).astype("<i8").tobytes()
    at_us = np.diff(points.at_us, prepend=np.int64(0)).astype("<i8").tobytes()
    return zlib.compress(steps + at_us + points.values.astype("<f8").tobytes(), 1)


def unpack(data: bytes, count: int) -> Points:
    """The points of a chunk. Raises ChunkError when the bytes are damaged."""
    try:
        raw = zlib.decompress(data)
    except zlib.error as error:
        raise ChunkError(f"a chunk cannot be read: {error}") from error
    if len(raw) != 24 * count:
        raise ChunkError(f"a chunk of {count} points has {len(raw)} bytes")
    steps, at_us = np.frombuffer(raw, "<i8", 2 * count).reshape(2, count)
    values = np.frombuffer(raw, "<f8", count, 16 * count)
    return Points(np.cumsum(steps), np.cumsum(at_us), values)


@dataclass(frozen=True)
class Buckets:
    """Rollup buckets of one level in order; a bucket without a finite value has NaN in min, max, first, last."""

    level: int
    bucket: Integers
    first_step: Integers
    last_step: Integers
    last_at_us: Integers
    count: Integers
    nan: Integers
    positive_infinity: Integers
    negative_infinity: Integers
    min: Floats
    max: Floats
    first: Floats
    last: Floats
    sum: Floats

    def __len__(self) -> int:
        return len(self.bucket)


COLUMNS = tuple(name for name in Buckets.__dataclass_fields__ if name != "level")


def roll_up(points: Points, level: int) -> Buckets:
    """Points (at least one) as buckets of 16**level steps."""
    bucket = points.steps >> (4 * level)
    starts = np.flatnonzero(np.append(True, bucket[1:] != bucket[:-1]))
    ends = np.append(starts[1:], len(bucket)) - 1
    finite = np.isfinite(points.values)
    summed = np.where(finite, points.values, 0.0)
    return Buckets(
        level=level,
        bucket=bucket[starts],
        first_step=points.steps[starts],
        last_step=points.steps[ends],
        last_at_us=points.at_us[ends],
        count=ends - starts + 1,
        nan=_count(np.isnan(points.values), starts),
        positive_infinity=_count(np.isposinf(points.values), starts),
        negative_infinity=_count(np.isneginf(points.values), starts),
        min=_none(np.minimum.reduceat(np.where(finite, points.values, np.inf), starts)),
        max=_none(np.maximum.reduceat(np.where(finite, points.values, -np.inf), starts)),
        first=_end(points.values, finite, starts, last=False),
        last=_end(points.values, finite, starts, last=True),
        sum=np.add.reduceat(summed, starts),
    )


def roll_up_again(lower: Buckets) -> Buckets:
    """Buckets (at least one) of the next level."""
    bucket = lower.bucket >> 4
    starts = np.flatnonzero(np.append(True, bucket[1:] != bucket[:-1]))
    ends = np.append(starts[1:], len(bucket)) - 1
    finite = np.isfinite(lower.min)
    return Buckets(
        level=lower.level + 1,
        bucket=bucket[starts],
        first_step=lower.first_step[starts],
        last_step=lower.last_step[ends],
        last_at_us=lower.last_at_us[ends],
        count=np.add.reduceat(lower.count, starts),
        nan=np.add.reduceat(lower.nan, starts),
        positive_infinity=np.add.reduceat(lower.positive_infinity, starts),
        negative_infinity=np.add.reduceat(lower.negative_infinity, starts),
        min=_none(np.minimum.reduceat(np.where(finite, lower.min, np.inf), starts)),
        max=_none(np.maximum.reduceat(np.where(finite, lower.max, -np.inf), starts)),
        first=_end(lower.first, finite, starts, last=False),
        last=_end(lower.last, finite, starts, last=True),
        sum=np.add.reduceat(lower.sum, starts),
    )


def _count(mask: NDArray[np.bool_], starts: NDArray[Any]) -> Integers:
    return np.add.reduceat(mask.astype(np.int64), starts)


def _none(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, np.nan)


def _end(values: Floats, finite: NDArray[np.bool_], starts: NDArray[Any], *, last: bool) -> Floats:
    """The first or last finite value of each run; NaN where a run has none."""
    positions = np.arange(len(values))
    if last:
        chosen = np.maximum.reduceat(np.where(finite, positions, -1), starts)
        missing = chosen < 0
    else:
        chosen = np.minimum.reduceat(np.where(finite, positions, len(values)), starts)
        missing = chosen >= len(values)
    return np.where(missing, np.nan, values[np.where(missing, 0, chosen)])
