"""Where masters and moments stand and where the update runs: on the device, or in host memory.

How an offloaded step goes on a GPU, copies (on streams of their own) below what they go on beside:

    device   backward of unit 2 | backward of unit 1 | ... | norm |  (waits)           | next forward
    out              sums of unit 2 | sums of unit 1 | ...
    host                                                          | update a stride | update the next | ...
    back                                                                            | its weights     | ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from zero_engine.arenas import Arenas
from zero_engine.blueprint import RETURN_SLOTS
from zero_engine.copies import Copies, Ticket
from zero_engine.layout import Piece, Range

SumsOf = Callable[[Piece, Range], Tensor]  # a piece and elements from its start -> 1-D fp32 unscaled sums


class StateHome(Protocol):
    """Memory for masters and moments, and the way of sums to the update and of weights back."""

    stride: int  # elements that are updated at once

    def masters(self, elements: int) -> Tensor:
        """1-D fp32."""

    def moments(self, elements: int) -> Tensor:
        """1-D fp32, zero."""

    def expect(self, pieces: Sequence[Piece]) -> None:
        """The pieces that will be updated here, in flat order."""

    def settled(self, part: Range, sums: Tensor) -> None:
        """These are the final sums of flat elements `part` (of one piece); they stay until the update is over."""

    def scaled(self, piece: Piece, part: Range, totals: SumsOf, scale: float) -> Tensor:
        """The sums x `scale` where the update runs; `part` counts from the start of the piece. Valid until the next
        call.
        """

    def hand_back(self, compute: Tensor, weight: Tensor) -> None:
        """Compute weights (1-D) follow their updated masters (1-D fp32)."""

    def fence(self) -> None:
        """What the device does from now on sees the weights handed back so far."""

    def rest(self) -> None:
        """The update is over, or was skipped: nothing is under way when this returns."""


class OnDevice:
    """No offload."""

    def __init__(self, arenas: Arenas, scratch: Tensor) -> None:
        self._arenas, self._scratch, self.stride = arenas, scratch, scratch.numel()

    def masters(self, elements: int) -> Tensor:
        return self._arenas.take("master", 4 * elements).view(torch.float32)

    def moments(self, elements: int) -> Tensor:
        return self._arenas.take("moments", 4 * elements).view(torch.float32).zero_()

    def expect(self, pieces: Sequence[Piece]) -> None:
        """They are here."""

    def settled(self, part: Range, sums: Tensor) -> None:
        """They are here."""

    def scaled(self, piece: Piece, part: Range, totals: SumsOf, scale: float) -> Tensor:
        sums = totals(piece, part)
        whole = sums.numel() == self.stride
        return torch.mul(sums, scale, out=self._scratch if whole else self._scratch[: sums.numel()])

    def hand_back(self, compute: Tensor, weight: Tensor) -> None:
        compute.copy_(weight)

    def fence(self) -> None:
        """Nothing is under way."""

    def rest(self) -> None:
        """Nothing is under way."""


class OnHost(OnDevice):
    """Offload on a CPU: the same path with the same bits, and a copy of sums and weights more."""

    def __init__(self, arenas: Arenas, stride: int) -> None:
        super().__init__(arenas, arenas.pin(4 * stride).view(torch.float32))

    def masters(self, elements: int) -> Tensor:
        return self._arenas.pin(4 * elements).view(torch.float32)

    def moments(self, elements: int) -> Tensor:
        return self._arenas.pin(4 * elements).view(torch.float32).zero_()

    def scaled(self, piece: Piece, part: Range, totals: SumsOf, scale: float) -> Tensor:
        sums = totals(piece, part)
        return self._scratch[: len(sums)].copy_(sums).mul_(scale)


class OverBus(OnHost):
    """Offload of a GPU. Sums leave as soon as they are final, while backward goes on; what this rank folds no sums of
    (stage 0 on several ranks) leaves when the update comes to its piece. Weights return while the next stride is
    updated, cast down on the host, so that the bus carries what the device computes in.
    """

    def __init__(self, arenas: Arenas, copies: Copies, stride: int, slot_bytes: int) -> None:
        self._arenas, self._copies, self.stride = arenas, copies, stride
        self._slots = [arenas.pin(slot_bytes) for _ in range(RETURN_SLOTS)]
        self._leaving: dict[Piece, list[tuple[Range, Ticket]]] = {}  # of the running step, by elements of the piece
        self._returning: list[Ticket] = []

    def expect(self, pieces: Sequence[Piece]) -> None:
        self._pieces, self._starts = pieces, [piece.range.start for piece in pieces]
        self._sums = self.masters(sum(len(piece.range) for piece in pieces))

    def settled(self, part: Range, sums: Tensor) -> None:
        piece = self._pieces[bisect_right(self._starts, part.start) - 1]
        first = part.start - piece.range.start
        self._leave(piece, Range(first, first + len(part)), sums)

    def scaled(self, piece: Piece, part: Range, totals: SumsOf, scale: float) -> Tensor:
        for gap in list(_gaps(len(piece.range), [left for left, _ in self._leaving.get(piece, [])])):
            for start in range(gap.start, gap.stop, self.stride):
                stretch = Range(start, min(start + self.stride, gap.stop))
                self._leave(piece, stretch, totals(piece, stretch))
        for left, ticket in self._leaving[piece]:
            if len(left.meet(part)):
                ticket.wait()
        return self._place(piece, part).mul_(scale)

    def _leave(self, piece: Piece, part: Range, sums: Tensor) -> None:
        ticket = self._copies.begin(self._place(piece, part), sums)
        self._leaving.setdefault(piece, []).append((part, ticket))

    def _place(self, piece: Piece, part: Range) -> Tensor:
        assert piece.local is not None
        return self._sums[piece.local + part.start : piece.local + part.stop]

    def hand_back(self, compute: Tensor, weight: Tensor) -> None:
        if compute.dtype == weight.dtype:
            self._returning.append(self._copies.begin(compute, weight))
            return
        number = len(self._returning)
        if number >= RETURN_SLOTS:
            self._returning[number - RETURN_SLOTS].wait()
        slot = self._slots[number % RETURN_SLOTS][: compute.nbytes].view(compute.dtype)
        self._returning.append(self._copies.begin(compute, slot.copy_(weight)))

    def fence(self) -> None:
        self._copies.fence()

    def rest(self) -> None:
        for tickets in self._leaving.values():
            for _, ticket in tickets:
                ticket.wait()
        for ticket in self._returning:
            ticket.wait()
        self._leaving.clear()
        self._returning.clear()


def _gaps(length: int, known: Sequence[Range]) -> Iterator[Range]:
    """What of elements 0 to `length` is in none of `known`, which do not overlap."""
    position = 0
    for part in sorted(known, key=lambda each: each.start):
        if part.start > position:
            yield Range(position, part.start)
        position = part.stop
    if position < length:
        yield Range(position, length)
