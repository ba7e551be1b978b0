"""The norm exchange: one small message per rank and step, so that every rank knows the same numbers.

| flag | losses of V, weights of V | touched parameters, one bit each | own block sums |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_engine.arenas import Arenas
from zero_engine.comm import Comm, Gather
from zero_engine.layout import Range
from zero_engine.plan import Blueprint


@dataclass(frozen=True)
class Outcome:
    """What all ranks together found in a step."""

    losses: tuple[float, ...]  # of the V micro-batches, in order
    weights: tuple[float, ...]  # of the V micro-batches
    flag: int
    touched: int  # bit p: parameter number p got a gradient somewhere
    block_sums: Tensor  # 1-D fp64, all trainable blocks in flat order


class Mailbox:
    """Writes this rank's message, reads everybody's."""

    def __init__(self, blueprint: Blueprint, comm: Comm, arenas: Arenas) -> None:
        self._comm, self._ranks = comm, blueprint.ranks
        self._mails = [blueprint.mail(rank) for rank in range(blueprint.ranks)]
        totals = [mail.total for mail in self._mails]
        self._own = arenas.share("other", "mail", totals)
        self._all = arenas.take("other", sum(totals))
        self._micro_batches = blueprint.config.batch_shape[0]
        self._maker = {
            index: rank
            for round in blueprint.schedule.rounds
            for rank, work in enumerate(round.work)
            if round.sends(rank)
            for index in work
        }
        self._order = _flat_order(blueprint)
        self.block_sums = self._part(self._own.local, 0, comm.rank, "norm").view(torch.float64)
        self._own.local.zero_()

    def open(self) -> None:
        """A step begins: block sums may be written."""
        self._comm.reclaim(self._own)

    def exchange(self, losses: dict[int, float], weights: dict[int, float], flag: int, touched: int) -> Outcome:
        """Send and read. `losses` and `weights` by micro-batch; this rank's `block_sums` are written beforehand."""
        rank, own = self._comm.rank, self._own.local
        self._part(own, 0, rank, "flag").view(torch.int64).fill_(flag)
        table = self._part(own, 0, rank, "loss").view(torch.float64).view(2, -1)
        for index, loss in losses.items():
            table[0, index], table[1, index] = loss, weights[index]
        bits = self._part(own, 0, rank, "touched")
        if len(bits):
            bits.copy_(torch.frombuffer(bytearray(touched.to_bytes(len(bits), "little")), dtype=torch.uint8))
        self._comm.publish(self._own, "norm exchange")
        self._read()
        self._comm.release(self._own)
        return self._outcome()

    def _read(self) -> None:
        """One gather, booked under the purpose of each part."""
        sources, targets, start = list[Range](), list[Range](), 0
        for mail in self._mails:
            sources.append(Range(0, mail.total))
            targets.append(Range(start, start + mail.total))
            start += mail.total
        self._comm.gather(self._own, Gather(tuple(sources), tuple(targets), "norm exchange"), self._all, "norm")
        for purpose in ("flag", "loss", "touched"):
            size = int(getattr(self._mails[self._comm.rank], purpose))
            self._comm.ledger.move("gather/norm", f"gather/{purpose}", size * (self._ranks - 1))

    def _outcome(self) -> Outcome:
        starts = [sum(mail.total for mail in self._mails[:rank]) for rank in range(self._ranks)]
        whole = self._all.cpu()
        parts = {
            name: [self._part(whole, starts[rank], rank, name) for rank in range(self._ranks)]
            for name in ("flag", "loss", "touched", "norm")
        }
        tables = [part.view(torch.float64).view(2, -1).tolist() for part in parts["loss"]]
        order = range(self._micro_batches)
        touched = 0
        for part in parts["touched"]:
            touched |= int.from_bytes(bytes(part.tolist()), "little")
        sums = torch.cat([part.view(torch.float64) for part in parts["norm"]])
        return Outcome(
            tuple(tables[self._maker[index]][0][index] for index in order),
            tuple(tables[self._maker[index]][1][index] for index in order),
            max(int(part.view(torch.int64).item()) for part in parts["flag"]),
            touched,
            sums[self._order],
        )

    def _part(self, storage: Tensor, start: int, rank: int, purpose: str) -> Tensor:
        offset, size = _place(self._mails[rank], purpose)
        return storage[start + offset : start + offset + size]


def mean_loss(outcome: Outcome) -> float:
    """The weighted mean of the micro-batch losses, summed in double in index order."""
    weight = total = 0.0
    for loss, each in zip(outcome.losses, outcome.weights, strict=True):
        total += loss
        weight += each
    return total / weight if weight else math.nan


def _place(mail: object, purpose: str) -> tuple[int, int]:
    """(offset, size) in bytes of one part of a message."""
    offset = 0
    for name in ("flag", "loss", "touched", "norm"):
        size = int(getattr(mail, name))
        if name == purpose:
            return offset, size
        offset += size
    raise AssertionError(purpose)


def _flat_order(blueprint: Blueprint) -> Tensor:
    """Where, in everybody's block sums one after the other, the blocks of the flat space stand in order."""
    places = list[tuple[int, int]]()
    for rank in range(blueprint.ranks):
        for piece in blueprint.layout.pieces(rank, blueprint.ranks):
            if piece.local is not None:
                blocks = range(piece.range.start, piece.range.stop, blueprint.layout.block)
                places += [(start, len(places) + number) for number, start in enumerate(blocks)]
    return torch.tensor([place for _, place in sorted(places)], dtype=torch.int64)
