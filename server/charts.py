"""From points or buckets to what a chart of a given width draws. Pure.

Note: why every drawn point carries a band. MinMaxLTTB keeps the look of a line, but a spike may stand between two
chosen points. Each chosen point therefore carries the least and the greatest value of the run that it stands for, and
non-finite values are kept as gaps and marks, so that nothing bad is hidden at any zoom.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tsdownsample import MinMaxLTTBDownsampler

from server.points import Buckets, Floats, Integers, Points
from server.views import NonFiniteMark, PointView


@dataclass(frozen=True)
class Curve:
    """A line before it is thinned: one entry per point or bucket, sorted by step."""

    steps: Integers  # (n,) where it is drawn
    at_us: Integers  # (n,)
    values: Floats  # (n,) NaN where nothing finite stands
    low: Floats  # (n,)
    high: Floats  # (n,)
    marks: tuple[NonFiniteMark, ...]
    non_finite_count: int
    count: int  # raw points that it stands for


def curve_of_points(points: Points, max_marks: int) -> Curve:
    """Raw points as a curve."""
    bad = np.flatnonzero(~np.isfinite(points.values))
    finite = np.where(np.isfinite(points.values), points.values, np.nan)
    marks = tuple(
        NonFiniteMark(step=int(points.steps[i]), value=float(points.values[i])) for i in _spread(bad, max_marks)
    )
    return Curve(points.steps, points.at_us, finite, finite, finite, marks, len(bad), len(points))


def curve_of_buckets(buckets: Buckets, max_marks: int) -> Curve:
    """Buckets as a curve: each drawn at its last step with its last value; a mark stands at a bucket's first step."""
    kinds = ((buckets.nan, np.nan), (buckets.positive_infinity, np.inf), (buckets.negative_infinity, -np.inf))
    marks = [
        NonFiniteMark(step=int(buckets.first_step[i]), value=float(value))
        for counts, value in kinds
        for i in _spread(np.flatnonzero(counts), max_marks)
    ]
    bad = sum(int(counts.sum()) for counts, _ in kinds)
    return Curve(
        steps=buckets.last_step,
        at_us=buckets.last_at_us,
        values=buckets.last,
        low=buckets.min,
        high=buckets.max,
        marks=tuple(sorted(marks, key=lambda mark: mark.step)),
        non_finite_count=bad,
        count=int(buckets.count.sum()),
    )


def draw(curve: Curve, width: int) -> list[PointView]:
    """About `width` points of a curve, in order, each with its band; a gap (value None) for each run of non-finite."""
    finite = np.flatnonzero(np.isfinite(curve.values))
    gaps = _spread(_run_starts(~np.isfinite(curve.values)), width)
    if not len(finite):
        return [_point(curve, int(i), None) for i in gaps]
    chosen = _choose(curve.steps[finite], curve.values[finite], width)
    low = np.minimum.reduceat(curve.low[finite], chosen)
    high = np.maximum.reduceat(curve.high[finite], chosen)
    drawn = {int(finite[c]): (float(low[i]), float(high[i])) for i, c in enumerate(chosen)}
    return [_point(curve, i, drawn.get(i)) for i in sorted({*drawn, *(int(g) for g in gaps)})]


def _choose(steps: Integers, values: Floats, width: int) -> NDArray[np.int64]:
    if len(steps) <= width:
        return np.arange(len(steps))
    thinner: Any = MinMaxLTTBDownsampler
    chosen = thinner().downsample(np.ascontiguousarray(steps), np.ascontiguousarray(values), n_out=max(3, width))
    indices = np.unique(np.asarray(chosen, dtype=np.int64))
    return indices if indices[0] == 0 else np.append(np.int64(0), indices)


def _point(curve: Curve, index: int, band: tuple[float, float] | None) -> PointView:
    return PointView(
        step=int(curve.steps[index]),
        at=moment(int(curve.at_us[index])),
        value=None if band is None else float(curve.values[index]),
        min=None if band is None else band[0],
        max=None if band is None else band[1],
    )


def moment(at_us: int) -> datetime:
    """Microseconds since 1970 as aware UTC."""
    return datetime.fromtimestamp(at_us / 1e6, UTC)


def _run_starts(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.flatnonzero(mask & ~np.append(False, mask[:-1]))


def _spread(indices: NDArray[Any], limit: int) -> NDArray[Any]:
    """At most `limit` of `indices`, evenly, the first and the last among them."""
    if len(indices) <= limit:
        return indices
    places = np.linspace(0, len(indices) - 1, max(2, limit)).round().astype(np.int64)
    return np.asarray(indices[places])
