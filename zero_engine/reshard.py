"""Which bytes of a checkpoint a rank needs, and where they lie: pure integers, torch-free.

A checkpoint was written by N ranks and is read by M. Both cut the same block space (the layout depends on the model
only), so reading is copying runs of blocks: `moves(have, need)` is the whole of resharding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zero_engine.layout import ITEM_BYTES, Layout, Piece

MASTER = "master"  # fp32 values of trainable parameters
FROZEN = "frozen"  # values of the others, in the dtype they are kept in


@dataclass(frozen=True, order=True)
class Run:
    """Contiguous blocks of one kind of state ("master", "exp_avg", ...) in the flat space of the layout."""

    kind: str
    first: int  # block
    count: int  # blocks, at least 1

    @property
    def stop(self) -> int:
        return self.first + self.count


@dataclass(frozen=True)
class Move:
    """Copy `count` blocks from block `source_block` of have[source] to block `target_block` of need[target]."""

    source: int
    source_block: int  # counted from the start of the source run
    target: int
    target_block: int  # counted from the start of the target run
    count: int


class MissingBlocks(ValueError):
    """The checkpoint does not hold a run that is needed."""

    def __init__(self, run: Run) -> None:
        super().__init__(f"blocks {run.first} to {run.stop - 1} of {run.kind} are in no shard")
        self.run = run


def moves(have: Sequence[Run], need: Sequence[Run]) -> tuple[Move, ...]:
    """The copies that fill every needed run, in order of need. The runs of `have` are disjoint within a kind.

    Raises MissingBlocks when a needed block is nowhere, ValueError when two shards claim the same block.
    """
    shelves, empty = _by_kind(have), _Shelf([], [])
    filled = (_fill(target, run, have, shelves.get(run.kind, empty)) for target, run in enumerate(need))
    return tuple(move for copies in filled for move in copies)


def needed(layout: Layout, moments: Sequence[str], rank: int = 0, ranks: int = 1) -> tuple[Run, ...]:
    """Every run of state that a rank saves and reads, in flat order: masters and moments, values of what is frozen."""
    return tuple(run for piece in layout.pieces(rank, ranks) for run in runs_of(layout, piece, moments))


def runs_of(layout: Layout, piece: Piece, moments: Sequence[str]) -> tuple[Run, ...]:
    """The kinds of state that a piece of the flat space has."""
    kinds = (FROZEN,) if piece.local is None else (MASTER, *moments)
    first, count = piece.range.start // layout.block, len(piece.range) // layout.block
    return tuple(Run(kind, first, count) for kind in kinds)


def bytes_to_read(layout: Layout, moments: Sequence[str], ranks: int, stage: int) -> tuple[int, ...]:
    """Bytes that each rank reads from a checkpoint to resume: known before launch.

    What it owns; at stage 0 everything, at stages 1 and 2 all frozen weights, which every rank keeps. Frozen weights
    are counted in the dtype the model declares.
    """
    whole = layout.pieces(0, 1)
    sizes = []
    for rank in range(ranks):
        own = whole if stage == 0 else layout.pieces(rank, ranks)
        frozen = whole if stage < 3 else own
        trained = sum(4 * (1 + len(moments)) * len(piece.range) for piece in own if piece.local is not None)
        kept = [piece for piece in frozen if piece.local is None]
        sizes.append(trained + sum(ITEM_BYTES[layout.runs[piece.run].dtype] * len(piece.range) for piece in kept))
    return tuple(sizes)


@dataclass(frozen=True)
class _Shelf:
    firsts: list[int]  # sorted; first blocks of the runs of one kind
    indices: list[int]  # their places in `have`


def _by_kind(have: Sequence[Run]) -> dict[str, _Shelf]:
    """The runs of each kind sorted by first block."""
    grouped: dict[str, list[int]] = defaultdict(list)
    for index, run in enumerate(have):
        grouped[run.kind].append(index)
    shelves = {}
    for kind, indices in grouped.items():
        indices.sort(key=lambda index: have[index].first)
        for before, after in pairwise(indices):
            if have[after].first < have[before].stop:
                raise ValueError(f"two shards hold block {have[after].first} of {kind}")
        shelves[kind] = _Shelf([have[index].first for index in indices], indices)
    return shelves


def _fill(target: int, run: Run, have: Sequence[Run], shelf: _Shelf) -> list[Move]:
    result, block = [], run.first
    while block < run.stop:
        place = bisect_right(shelf.firsts, block) - 1
        if place < 0 or have[shelf.indices[place]].stop <= block:
            raise MissingBlocks(Run(run.kind, block, run.stop - block))
        source = have[shelf.indices[place]]
        count = min(source.stop, run.stop) - block
        result.append(Move(shelf.indices[place], block - source.first, target, block - run.first, count))
        block += count
    return result
