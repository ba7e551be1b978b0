"""The planner of reading: every needed block comes from exactly where it was written."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_engine.layout import Layout, ParameterSpec
from zero_engine.reshard import MissingBlocks, Move, Run, bytes_to_read, moves, needed


def cut(kind: str, blocks: int, ranks: int) -> list[Run]:
    """The block space cut into `ranks` contiguous runs, empty ones left out."""
    edges = [blocks * rank // ranks for rank in range(ranks + 1)]
    return [Run(kind, first, stop - first) for first, stop in pairwise(edges) if stop > first]


def test_the_same_cut_is_one_copy_per_run() -> None:
    """Reading with the ranks that wrote copies each run whole."""
    runs = cut("master", 10, 3)
    assert moves(runs, runs) == tuple(Move(i, 0, i, 0, run.count) for i, run in enumerate(runs))


def test_two_ranks_to_three_by_hand() -> None:
    """A literal case: [0 1 2 | 3 4 5] read as [0 1 | 2 3 | 4 5]."""
    assert moves(cut("m", 6, 2), cut("m", 6, 3)) == (
        Move(0, 0, 0, 0, 2),
        Move(0, 2, 1, 0, 1),
        Move(1, 0, 1, 1, 1),
        Move(1, 1, 2, 0, 2),
    )


def test_kinds_do_not_mix() -> None:
    """A moment is never read where a master weight lies."""
    have = [Run("exp_avg", 0, 4), Run("master", 0, 4)]
    assert moves(have, [Run("master", 1, 2)]) == (Move(1, 1, 0, 0, 2),)


def test_a_missing_block_is_named() -> None:
    """A hole is an error that says which kind and which blocks, not zeros."""
    with pytest.raises(MissingBlocks, match="blocks 4 to 5 of master"):
        moves([Run("master", 0, 4)], [Run("master", 2, 4)])
    with pytest.raises(MissingBlocks, match="ema"):
        moves([Run("master", 0, 4)], [Run("ema", 0, 1)])


def test_two_shards_with_the_same_block_are_refused() -> None:
    """A block has one owner; two claims mean a manifest that lies."""
    with pytest.raises(ValueError, match="block 3 of m"):
        moves([Run("m", 0, 4), Run("m", 3, 2)], [])


@given(blocks=st.integers(1, 60), old=st.integers(1, 9), new=st.integers(1, 9), data=st.data())
def test_every_needed_block_is_copied_once_from_its_place(blocks: int, old: int, new: int, data: st.DataObject) -> None:
    """For any two cuts, executing the moves on a numbered array reproduces the numbers."""
    have = data.draw(st.permutations(cut("m", blocks, old) + cut("v", blocks, old)))
    need = cut("v", blocks, new) + cut("m", blocks, new)
    targets = [[-1] * run.count for run in need]
    for move in moves(have, need):
        assert have[move.source].kind == need[move.target].kind
        for i in range(move.count):
            assert targets[move.target][move.target_block + i] == -1
            targets[move.target][move.target_block + i] = have[move.source].first + move.source_block + i
    assert targets == [list(range(run.first, run.stop)) for run in need]


def test_the_bytes_of_a_resume_are_known_before_launch() -> None:
    """Together the ranks of stage 3 read each byte once; at stage 0 each reads all, at 1 and 2 frozen weights too."""
    layout = Layout.build(SPECS)
    trained, frozen = 3 * 4 * layout.trainable, 4 * 1024 + 8 * 512
    assert sum(bytes_to_read(layout, ("m", "v"), 3, stage=3)) == trained + frozen
    assert sum(bytes_to_read(layout, ("m", "v"), 3, stage=1)) == trained + 3 * frozen
    assert bytes_to_read(layout, ("m", "v"), 2, stage=0) == (trained + frozen,) * 2


SPECS = (
    ParameterSpec("a", (1000,)),
    ParameterSpec("b", (700,), unit="u"),
    ParameterSpec("c", (900,), unit="u", trainable=False),
    ParameterSpec("d", (300,), unit="u", trainable=False, dtype="int64"),
    ParameterSpec("e", (5000,), unit="v"),
)


def test_frozen_parts_have_values_and_no_moments() -> None:
    """What trains has master and moments, what is frozen only its value: no optimizer bytes for it."""
    assert needed(Layout.build(SPECS[:3]), ("exp_avg",)) == (
        Run("master", 0, 4),
        Run("exp_avg", 0, 4),
        Run("frozen", 4, 4),
        Run("master", 8, 3),
        Run("exp_avg", 8, 3),
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 40])
def test_the_ranks_own_everything_once(ranks: int) -> None:
    """The runs of all ranks together are exactly what a checkpoint must hold."""
    layout = Layout.build(SPECS)
    have = [run for rank in range(ranks) for run in needed(layout, ("exp_avg",), rank, ranks)]
    whole = needed(layout, ("exp_avg",))
    assert sum(move.count for move in moves(have, whole)) == sum(run.count for run in have)
    assert {run.kind for run in whole} == {"master", "exp_avg", "frozen"}
