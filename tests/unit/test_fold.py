"""The order of the sum."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from zero_engine.fold import Schedule, schedule_of

_shapes = st.integers(1, 12).flatmap(
    lambda v: st.tuples(st.just(v), st.integers(1, v), st.integers(1, v), st.booleans())
)


def _expected(micro_batches: int, chunk: int) -> Any:
    """The bracketing as nested tuples."""
    total: Any = None
    for start in range(0, micro_batches, chunk):
        part: Any = None
        for index in range(start, min(start + chunk, micro_batches)):
            part = index if part is None else (part, index)
        total = part if total is None else (total, part)
    return total


def _played(schedule: Schedule) -> Any:
    """What an owner's accumulators hold after all rounds, as nested tuples."""
    chunk, total = None, None
    for round in schedule.rounds:
        for fold in round.folds:
            piece: Any = None
            for index in round.work[fold.source]:
                piece = index if piece is None else (piece, index)
            chunk = piece if fold.opens else (chunk, piece)
            if fold.closes:
                total = chunk if fold.first else (total, chunk)
    return total


@given(_shapes)
def test_every_schedule_folds_in_the_same_order(shape: tuple[int, int, int, bool]) -> None:
    """Local and shard schedules of any number of ranks give the bracketing that V and C alone define."""
    micro_batches, chunk, ranks, by_unit = shape
    assert _played(schedule_of(micro_batches, chunk, ranks, by_unit)) == _expected(micro_batches, chunk)


@given(_shapes)
def test_every_micro_batch_counts_once_and_ranks_keep_step(shape: tuple[int, int, int, bool]) -> None:
    """Pieces cover 0..V-1 once; in the shard schedule every rank runs in every round, idle ones repeat."""
    micro_batches, chunk, ranks, by_unit = shape
    schedule = schedule_of(micro_batches, chunk, ranks, by_unit)
    made = [index for round in schedule.rounds for fold in round.folds for index in round.work[fold.source]]
    assert made == list(range(micro_batches))
    if schedule.kind == "shard":
        assert all(len(work) == 1 for round in schedule.rounds for work in round.work)
    assert 0 <= schedule.idle_share < 1


def test_the_example_of_the_design() -> None:
    """V=8, C=2, N=3, both schedules."""
    local, shard = schedule_of(8, 2, 3, by_unit=False), schedule_of(8, 2, 3, by_unit=True)
    assert [round.work for round in local.rounds] == [((0, 1), (2, 3), (4, 5)), ((6, 7), (), ())]
    assert [[fold.source for fold in round.folds] for round in shard.rounds] == [[0, 1, 2], [0, 1, 2], [0, 1]]
    assert shard.rounds[-1].work == ((6,), (7,), (5,))
    assert schedule_of(8, 2, 5, by_unit=False).kind == "shard"  # more ranks than chunks
