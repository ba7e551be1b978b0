"""The small loss curve of the jobs list: full early, and never too long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.sparkline import SPARKLINE_VALUES, Sparkline

EMPTY = Sparkline((), 1)


def drawn(*steps: int) -> Sparkline:
    """The curve after these steps, the loss of each being its number."""
    curve = EMPTY
    for step in steps:
        curve = curve.after(step, float(step))
    return curve


@given(st.integers(1, 5000))
def test_a_curve_is_at_least_half_full_however_far_the_job_has_come(steps: int) -> None:
    """Property: a value for each of the first steps, later between 20 and 40; the newest loss stands last."""
    values = drawn(*range(1, steps + 1)).values
    assert min(steps, SPARKLINE_VALUES // 2) <= len(values) <= SPARKLINE_VALUES
    assert values[-1] == steps and list(values) == sorted(values, key=lambda value: value or 0)


def test_each_value_is_the_last_of_its_steps() -> None:
    """Property: after 41 steps each value stands for two of them."""
    curve = drawn(*range(1, 42))
    assert (curve.stride, curve.values) == (2, (*(float(step) for step in range(2, 41, 2)), 41.0))


def test_a_resume_further_back_cuts_what_was_beyond() -> None:
    """Property: the curve is that of the newest attempt."""
    assert drawn(1, 2, 3, 4, 2).values == (1.0, 2.0)
    assert drawn(*range(1, 81), 41).values[-1] == 41.0


def test_a_loss_that_is_not_finite_and_steps_without_one_are_gaps() -> None:
    """Property: nothing is drawn where nothing is known, also far beyond the room."""
    assert EMPTY.after(1, None).after(3, 3.0).values == (None, None, 3.0)
    assert EMPTY.after(1, 1.0).after(10**12, 2.0).values[-1] == 2.0
