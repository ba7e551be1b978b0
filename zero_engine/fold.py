"""In which order a step's gradient pieces are summed: a two-level left fold over the micro-batch number. Torch-free.

    total = fold over chunks of (fold over the C micro-batches of a chunk)

Two schedules give that same order. *Local*: chunk c belongs to rank c mod N, which folds it by itself; a round brings N
finished chunks to the owners. *Shard*: micro-batch i runs on rank i mod N; a round brings N micro-batches, and the
owners fold both levels. With V = 8, C = 2, N = 3:

    local   {c0 on r0, c1 on r1, c2 on r2}  {c3 on r0, idle, idle}
    shard   {0 1 2}  {3 4 5}  {6 7 idle}                              both: ((s01 + s23) + s45) + s67
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Fold:
    """One piece that arrives at an owner, and what becomes of it."""

    source: int  # the rank that made it
    opens: bool  # first of its chunk: starts the chunk sum
    closes: bool  # last of its chunk: the chunk sum then goes to the total
    first: bool  # its chunk is the first: starts the total
    summed: bool  # a sum of two or more leaves (fp32); otherwise a single leaf in its own dtype


@dataclass(frozen=True)
class Round:
    """Work between two exchanges, and the pieces of the exchange in the order in which owners fold them."""

    work: tuple[tuple[int, ...], ...]  # micro-batches by rank, in order
    folds: tuple[Fold, ...]

    def sends(self, rank: int) -> bool:
        """Whether `rank` made a piece in this round (an idle rank repeats a micro-batch; that piece is skipped)."""
        return any(fold.source == rank for fold in self.folds)


@dataclass(frozen=True)
class Task:
    """One micro-batch of one rank."""

    index: int
    round: Round
    opens: bool  # first of this rank's work in the round
    closes: bool  # last of it: its pieces may travel
    counts: bool  # False for a repeat, whose piece is skipped


@dataclass(frozen=True)
class Schedule:
    """All rounds of one optimizer step."""

    micro_batches: int
    chunk: int
    ranks: int
    kind: str  # local | shard
    rounds: tuple[Round, ...]

    @cached_property
    def carries_total(self) -> bool:
        """Whether owners keep a total from one round to the next."""
        return len(self.rounds) > 1

    @cached_property
    def carries_chunk(self) -> bool:
        """Whether some chunk is left open at the end of a round, so that owners keep a chunk sum too."""
        return any(not round.folds[-1].closes for round in self.rounds)

    @cached_property
    def widest(self) -> bool:
        """Whether some piece is a sum, so that buffers for pieces hold fp32."""
        return any(fold.summed for round in self.rounds for fold in round.folds)

    def work(self, rank: int) -> tuple[int, ...]:
        """Every micro-batch `rank` runs in a step, repeats included, in order."""
        return tuple(index for round in self.rounds for index in round.work[rank])

    def tasks(self, rank: int) -> Iterator[Task]:
        """The same, each with its place in its round."""
        for round in self.rounds:
            work = round.work[rank]
            for place, index in enumerate(work):
                yield Task(index, round, place == 0, place + 1 == len(work), round.sends(rank))

    @cached_property
    def idle_share(self) -> float:
        """Part of the ranks' time that makes no piece, counted in micro-batches: 0 when V is a multiple of N x C."""
        busiest = sum(max(map(len, round.work)) for round in self.rounds)
        return 1 - self.micro_batches / (self.ranks * busiest)


def schedule_of(micro_batches: int, chunk: int, ranks: int, by_unit: bool) -> Schedule:
    """The schedule of V micro-batches in chunks of C on N <= V ranks; `by_unit`: gradients leave as units finish."""
    assert 1 <= chunk <= micro_batches and 1 <= ranks <= micro_batches, (micro_batches, chunk, ranks)
    chunks = -(-micro_batches // chunk)
    if by_unit or ranks > chunks:
        return Schedule(micro_batches, chunk, ranks, "shard", _shard_rounds(micro_batches, chunk, ranks))
    return Schedule(micro_batches, chunk, ranks, "local", _local_rounds(micro_batches, chunk, ranks))


def _local_rounds(micro_batches: int, chunk: int, ranks: int) -> tuple[Round, ...]:
    chunks = [tuple(range(i, min(i + chunk, micro_batches))) for i in range(0, micro_batches, chunk)]
    rounds = list[Round]()
    for start in range(0, len(chunks), ranks):
        present = chunks[start : start + ranks]
        folds = tuple(Fold(r, True, True, start + r == 0, len(part) > 1) for r, part in enumerate(present))
        rounds.append(Round((*present, *[()] * (ranks - len(present))), folds))
    return tuple(rounds)


def _shard_rounds(micro_batches: int, chunk: int, ranks: int) -> tuple[Round, ...]:
    rounds = list[Round]()
    for start in range(0, micro_batches, ranks):
        present = range(start, min(start + ranks, micro_batches))
        folds = tuple(_shard_fold(index, micro_batches, chunk, ranks) for index in present)
        repeats = range(start - ranks + len(present), start)
        rounds.append(Round(tuple((index,) for index in (*present, *repeats)), folds))
    return tuple(rounds)


def _shard_fold(index: int, micro_batches: int, chunk: int, ranks: int) -> Fold:
    last = (index + 1) % chunk == 0 or index + 1 == micro_batches
    return Fold(index % ranks, index % chunk == 0, last, index < chunk, False)
