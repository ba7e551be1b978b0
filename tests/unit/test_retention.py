"""Which checkpoints may go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.controller.retention import Keeping, Kept, removable


def row(step: int, attempt: int = 1, **facts: object) -> Kept:
    fields: dict[str, object] = {"usable": True, **facts}
    return Kept(f"{attempt}/{step}", step, attempt, **fields)  # type: ignore[arg-type]


def test_the_newest_stay_and_the_oldest_go_first() -> None:
    """keep_latest counts usable checkpoints."""
    assert removable([row(s) for s in (10, 20, 30, 40)], Keeping(2)) == ("1/10", "1/20")


def test_a_corrupt_newest_does_not_count_as_one_of_the_kept() -> None:
    """Two that can be read always remain."""
    rows = [row(10), row(20), row(30), row(40, usable=False)]
    assert removable(rows, Keeping(2)) == ("1/10",)


def test_a_corrupt_one_goes_when_two_newer_usable_ones_exist() -> None:
    """It is evidence until then, a waste of space after."""
    rows = [row(10, usable=False), row(20), row(30)]
    assert removable(rows, Keeping(2)) == ("1/10",)


def test_pinned_and_held_ones_stay_whatever_their_age() -> None:
    """A paused job's point of resume and what a living attempt reads are not ours to remove."""
    rows = [row(10, pinned=True), row(20), row(30), row(40)]
    assert removable(rows, Keeping(2), held={"1/20"}) == ()


def test_newest_means_the_newest_attempt_not_the_highest_step() -> None:
    """After a resume from further back the branch that lives is the one that is kept."""
    rows = [row(90), row(100), row(60, attempt=2), row(70, attempt=2)]
    assert removable(rows, Keeping(2)) == ("1/90", "1/100")


def test_the_best_by_evaluation_stay_too_and_nan_is_never_best() -> None:
    """keep_best beside keep_latest; of equal losses the later step."""
    rows = [row(10, eval_loss=float("nan")), row(20, eval_loss=1.0), row(30, eval_loss=2.0), row(40), row(50)]
    assert removable(rows, Keeping(2, 1)) == ("1/10", "1/30")


def test_the_newest_may_be_the_best_and_then_no_others_stay_for_it() -> None:
    """keep_best names the best of all: while the loss falls they are the newest, and when it rises they grow old."""
    falling = [row(step, eval_loss=1 / step) for step in (10, 20, 30, 40)]
    assert removable(falling, Keeping(2, 2)) == ("1/10", "1/20")
    rising = [row(step, eval_loss=float(step)) for step in (10, 20, 30, 40, 50)]
    assert removable(rising, Keeping(2, 2)) == ("1/30",)


def test_two_that_were_read_back_stay_behind_newer_ones_that_were_not() -> None:
    """Every save since a moment may be damaged without anybody knowing yet."""
    rows = [row(10, verified=True), row(20, verified=True), row(30, verified=True), row(40), row(50)]
    assert removable(rows, Keeping(2)) == ("1/10",)


def test_every_nth_step_stays_for_good() -> None:
    """A trail through the whole run; a damaged one is no part of it."""
    rows = [row(s) for s in (10, 20, 30, 40, 50, 60)] + [row(0, usable=False)]
    assert removable(rows, Keeping(2, every=20)) == ("1/0", "1/10", "1/30")


@given(
    rows=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 20), st.booleans(), st.booleans()), max_size=12),
    keep=st.integers(2, 4),
)
def test_two_usable_checkpoints_survive_every_history(rows: list[tuple[int, int, bool, bool]], keep: int) -> None:
    """Whatever was saved, damaged and pinned: the newest two usable ones stay, and no pinned one goes."""
    unique = {(attempt, step): (usable, pinned) for attempt, step, usable, pinned in rows}
    history = [row(s, a, usable=u, pinned=p) for (a, s), (u, p) in unique.items()]
    gone = set(removable(history, Keeping(keep)))
    left = [c for c in history if c.id not in gone]
    usable = sorted((c for c in history if c.usable), key=lambda c: (c.attempt, c.step))
    assert all(c in left for c in usable[-2:])
    assert all(c in left for c in history if c.pinned)
