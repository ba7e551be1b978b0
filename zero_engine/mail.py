"""The norm exchange: one small message per rank and step, so that every rank knows the same numbers.

| flag and mark | losses of V, weights of V | touched parameters, one bit each | own block sums |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from zlib import crc32

import torch
from torch import Tensor

from zero_engine.arenas import Arenas
from zero_engine.blueprint import Blueprint
from zero_engine.comm import Comm, Gather
from zero_engine.layout import Range
from zero_engine.tally import Tally

_WORD_BYTES = 8
_WORD = (1 << 64) - 1  # a word without its sign
FLAGS = 1 << 32  # a flag is below


@dataclass(frozen=True)
class Outcome:
    """What all ranks together found in a step."""

    losses: tuple[float, ...]  # of the V micro-batches, in order
    weights: tuple[float, ...]  # of the V micro-batches
    flag: int
    marks: tuple[int, ...]  # of what each rank does with it, rank by rank
    touched: int  # bit p: parameter number p got a gradient somewhere
    block_sums: Tensor  # 1-D fp64, all trainable blocks in flat order


class Mailbox:
    """Writes this rank's message, reads everybody's. Every part is whole words of 8 bytes."""

    def __init__(self, blueprint: Blueprint, comm: Comm, arenas: Arenas) -> None:
        self._comm, self._mail = comm, blueprint.mail(comm.rank)
        totals = [blueprint.mail(rank).total for rank in range(blueprint.ranks)]
        starts = [sum(totals[:rank]) for rank in range(blueprint.ranks)]
        self._own = arenas.share("other", "mail", totals)
        self._all = arenas.take("other", sum(totals))
        self._gather = Gather(
            tuple(Range(0, total) for total in totals),
            tuple(Range(start, start + total) for start, total in zip(starts, totals, strict=True)),
            "norm exchange",
        )
        ends = accumulate((self._mail.flag, self._mail.loss, self._mail.touched, self._mail.norm), initial=0)
        flag, table, touched, norm = (self._own.local[start:stop] for start, stop in pairwise(ends))
        self._flag, self._touched, self.block_sums = flag.view(torch.int64), touched, norm.view(torch.float64)
        self._table = table.view(torch.float64).view(2, -1)
        self._places = _Places.of(blueprint, [start // _WORD_BYTES for start in starts])
        self._own.local.zero_()

    def open(self) -> None:
        """A step begins: block sums may be written."""
        self._comm.reclaim(self._own)

    def exchange(self, tally: Tally, flag: int, touched: int, mark: int) -> Outcome:
        """Send and read; this rank's `block_sums` stand written. `flag`: 0 to 2^32 - 1; `mark`: 0 to 2^31 - 1."""
        every = range(self._table.shape[1])
        table = [[numbers.get(index, 0.0) for index in every] for numbers in (tally.losses(), tally.weights)]
        self._flag.fill_(mark * FLAGS + flag)
        self._table.copy_(torch.tensor(table, dtype=torch.float64))
        if size := len(self._touched):
            bits = bytearray(touched.to_bytes(size, "little"))
            self._touched.copy_(torch.frombuffer(bits, dtype=torch.uint8))
        self._comm.publish(self._own, "norm exchange")
        self._comm.gather(self._own, self._gather, self._all, "norm")
        for purpose in ("flag", "loss", "touched"):  # one message, booked under the purpose of each part
            size = int(getattr(self._mail, purpose))
            self._comm.ledger.move("gather/norm", f"gather/{purpose}", size * (self._comm.ranks - 1))
        self._comm.release(self._own)
        return self._outcome()

    def _outcome(self) -> Outcome:
        words = self._all.cpu().view(torch.int64)
        numbers, places = words.view(torch.float64), self._places
        losses, weights = numbers[places.losses].tolist()
        touched = 0
        for row in words[places.touched].tolist():
            for number, word in enumerate(row):
                touched |= (word & _WORD) << 64 * number
        marks, flags = zip(*(divmod(word, FLAGS) for word in words[places.flags].tolist()), strict=True)
        return Outcome(tuple(losses), tuple(weights), max(flags), marks, touched, numbers[places.norms])


@dataclass(frozen=True)
class _Places:
    """Where things stand among everybody's messages, in words."""

    flags: Tensor  # (ranks)
    losses: Tensor  # (2, V): the loss of each micro-batch from the rank that made it, and its weight
    touched: Tensor  # (ranks, words)
    norms: Tensor  # the blocks of the flat space in order

    @classmethod
    def of(cls, blueprint: Blueprint, starts: Sequence[int]) -> _Places:
        """`starts`: the first word of each rank's message."""
        micro_batches, _ = blueprint.config.batch_shape
        maker = {
            index: rank
            for round in blueprint.schedule.rounds
            for rank, work in enumerate(round.work)
            if round.sends(rank)
            for index in work
        }
        losses = [starts[maker[index]] + 1 + index for index in range(micro_batches)]
        bits = 1 + 2 * micro_batches  # the first word after the flag, losses and weights
        norms = bits + blueprint.mail(0).touched // _WORD_BYTES
        touched = [range(start + bits, start + norms) for start in starts]
        return cls(
            torch.tensor(starts),
            torch.tensor([losses, [place + micro_batches for place in losses]]),
            torch.tensor([list(words) for words in touched], dtype=torch.int64),
            _flat_order(blueprint, [start + norms for start in starts]),
        )


def mark_of(value: object) -> int:
    """31 bits by which ranks see that they have the same value."""
    return crc32(repr(value).encode()) >> 1


def mean_loss(outcome: Outcome) -> float:
    """The weighted mean of the micro-batch losses, summed in double in index order."""
    weight = total = 0.0
    for loss, each in zip(outcome.losses, outcome.weights, strict=True):
        total += loss
        weight += each
    return total / weight if weight else math.nan


def _flat_order(blueprint: Blueprint, starts: Sequence[int]) -> Tensor:
    """Where the block sums of the flat space stand in order; `starts`: the word of each rank's first."""
    places, block = list[tuple[int, int]](), blueprint.layout.block
    for rank, first in enumerate(starts):
        pieces = [piece for piece in blueprint.layout.pieces(rank, blueprint.ranks) if piece.local is not None]
        blocks = [start for piece in pieces for start in range(piece.range.start, piece.range.stop, block)]
        places += [(start, first + number) for number, start in enumerate(blocks)]
    return torch.tensor([place for _, place in sorted(places)], dtype=torch.int64)
