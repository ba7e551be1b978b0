"""The dynamic loss scale of fp16."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zero_engine.loss_scale import FLOOR, LossScale, loss_scale_of


def test_it_doubles_after_enough_finite_steps_and_halves_at_once() -> None:
    """Growth counts finite steps in a row; an overflow starts the count again."""
    scale = LossScale(8.0, growth_steps=3)
    seen = []
    for finite in (True, True, False, True, True, True, True):
        scale = scale.after(finite)
        seen.append(scale.scale)
    assert seen == [8, 8, 4, 4, 4, 8, 8]


@given(st.lists(st.booleans(), max_size=60))
def test_it_stays_a_power_of_two_at_or_above_the_floor(steps: list[bool]) -> None:
    """So that multiplying by it rounds nothing, and that an endless overflow ends in an error, not in a loop."""
    scale = LossScale(4.0, growth_steps=2)
    for finite in steps:
        scale = scale.after(finite)
        assert scale.scale >= FLOOR and scale.scale.hex().startswith("0x1.0000000000000p")
        assert scale.exhausted == (scale.scale == FLOOR)


def test_other_precisions_have_none() -> None:
    """The factor is 1 and never moves."""
    scale = loss_scale_of("bf16", 65536.0, 1)
    assert scale.scale == 1 and scale.after(False) == scale.after(True) == scale and not scale.exhausted
