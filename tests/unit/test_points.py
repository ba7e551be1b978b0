"""Points as bytes, rollups anchored at step 0, and what a chart draws of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from server.charts import Curve, curve_of_buckets, curve_of_points, draw
from server.points import COLUMNS, Buckets, ChunkError, Points, merge, pack, roll_up, roll_up_again, unpack

floats = st.floats(width=64)


@st.composite
def point_sets(draw_: st.DrawFn, min_size: int = 1, max_size: int = 80) -> Points:
    """Sorted points with gaps between steps and values of every kind."""
    steps = draw_(st.lists(st.integers(0, 5000), min_size=min_size, max_size=max_size, unique=True))
    values = draw_(hnp.arrays(np.float64, len(steps), elements=floats))
    ordered = np.array(sorted(steps), np.int64)
    return Points(ordered, ordered * 1_000_000, values)


@given(point_sets())
def test_a_chunk_comes_back_bit_for_bit(points: Points) -> None:
    """Steps, times and the bits of every value, NaN and infinities among them."""
    back = unpack(pack(points), len(points))
    assert (back.steps == points.steps).all() and (back.at_us == points.at_us).all()
    assert back.values.tobytes() == points.values.tobytes()


def test_a_damaged_chunk_says_so() -> None:
    """Garbage, a cut and another count raise ChunkError, never numbers."""
    data = pack(Points(np.arange(5), np.arange(5), np.arange(5.0)))
    for bad, count in ((b"garbage", 5), (data[:-3], 5), (data, 4)):
        with pytest.raises(ChunkError):
            unpack(bad, count)


@given(st.lists(point_sets(max_size=20), max_size=4))
def test_a_merge_has_each_step_once_and_the_last_part_wins(parts: list[Points]) -> None:
    """As a dictionary that is filled in order."""
    expected: dict[int, bytes] = {}
    for part in parts:
        expected |= {int(s): v.tobytes() for s, v in zip(part.steps, part.values, strict=True)}
    merged = merge(parts)
    assert merged.steps.tolist() == sorted(expected)
    assert [v.tobytes() for v in merged.values] == [expected[s] for s in sorted(expected)]


def _same(a: Buckets, b: Buckets) -> None:
    for name in COLUMNS:
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-9, err_msg=name)


@given(point_sets().filter(lambda p: bool(np.all(~np.isfinite(p.values) | (np.abs(p.values) < 1e100)))))
def test_a_rollup_of_a_rollup_is_the_rollup(points: Points) -> None:
    """Level 2 from level 1 equals level 2 from the points: counts, extremes, ends, sums."""
    _same(roll_up_again(roll_up(points, 1)), roll_up(points, 2))


@given(point_sets())
def test_a_bucket_holds_exactly_its_sixteen_steps(points: Points) -> None:
    """Anchored at step 0 whatever the first step is; each point is counted once, as what it is."""
    buckets = roll_up(points, 1)
    for index, bucket in enumerate(buckets.bucket):
        inside = points.values[(points.steps >= bucket * 16) & (points.steps < bucket * 16 + 16)]
        finite = inside[np.isfinite(inside)]
        assert buckets.count[index] == len(inside)
        assert buckets.nan[index] == np.isnan(inside).sum()
        assert buckets.positive_infinity[index] == np.isposinf(inside).sum()
        if len(finite):
            assert (buckets.min[index], buckets.max[index]) == (finite.min(), finite.max())
            assert (buckets.first[index], buckets.last[index]) == (finite[0], finite[-1])
        else:
            assert math.isnan(buckets.min[index]) and math.isnan(buckets.last[index])
    assert buckets.count.sum() == len(points)


@given(point_sets(), st.integers(1, 30))
def test_no_value_is_hidden_at_any_width(points: Points, width: int) -> None:
    """The band's extremes are the data's; the steps are real and in order; non-finite values are counted and marked."""
    curve = curve_of_points(points, 1000)
    drawn = draw(curve, width)
    finite = points.values[np.isfinite(points.values)]
    bands = [p for p in drawn if p.value is not None]
    if len(finite):
        assert min(p.min for p in bands if p.min is not None) == finite.min()
        assert max(p.max for p in bands if p.max is not None) == finite.max()
    steps = [p.step for p in drawn]
    assert steps == sorted(set(steps)) and set(steps) <= set(points.steps.tolist())
    assert len(bands) <= max(4, width + 1)
    assert curve.non_finite_count == len(points) - len(finite) == len(curve.marks)


def test_a_number_between_two_nans_is_a_point_with_marks_beside_it() -> None:
    """Values NaN, 1, NaN: a dot and two marks."""
    curve = curve_of_points(Points(np.arange(3), np.arange(3), np.array([math.nan, 1.0, math.nan])), 10)
    assert [(p.step, p.value) for p in draw(curve, 100)] == [(0, None), (1, 1.0), (2, None)]
    assert [mark.step for mark in curve.marks] == [0, 2]


def test_a_spike_of_one_step_in_a_hundred_thousand_is_seen_from_the_buckets_too() -> None:
    """The band of the bucket that holds it reaches down to it."""
    values = np.ones(100_000)
    values[54_321] = 0.0
    points = Points(np.arange(100_000), np.arange(100_000), values)
    for curve in (curve_of_points(points, 10), curve_of_buckets(roll_up(points, 3), 10)):
        low = [p for p in draw(curve, 200) if p.min == 0.0]
        assert len(low) == 1 and abs(low[0].step - 54_321) < 5000


def test_a_sparse_series_keeps_every_point() -> None:
    """300 values, one every 1,000 steps: 300 points."""
    steps = np.arange(300) * 1000
    curve = curve_of_points(Points(steps, steps, np.sin(steps)), 10)
    assert [p.step for p in draw(curve, 800)] == steps.tolist()


def test_an_empty_curve_draws_nothing() -> None:
    """No points, no error."""
    none = np.empty(0)
    empty = Curve(none.astype(np.int64), none.astype(np.int64), none, none, none, (), 0, 0)
    assert draw(empty, 10) == []
