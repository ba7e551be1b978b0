"""fp32 master weights, moments and step counts of what a rank updates, and the update itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from zero_engine.adamw import Optimizer
from zero_engine.blueprint import Blueprint
from zero_engine.flat import write_values
from zero_engine.layout import Entry, Piece, Range
from zero_engine.states import StateHome


@dataclass(frozen=True)
class Span:
    """Neighbouring parameters of one piece that take the same update: same group, same step count."""

    piece: int
    start: int  # elements from the start of the piece
    stop: int
    ordinal: int  # one of its parameters


@dataclass(frozen=True)
class Stretch:
    """What one call of the update works on, a stride of a span: views that never move, made once."""

    piece: Piece
    part: Range  # elements from the start of the piece
    ordinal: int  # one of its parameters
    group: int
    weight: Tensor  # 1-D fp32, as all of them
    moments: list[Tensor]
    compute: Tensor | None  # 1-D, where compute weights stand apart from their masters


class Master:
    """The states of `pieces`: at stage 0 of everything, else of what this rank owns.

    Where compute weights are fp32 they are the master weights; elsewhere a master is kept and cast down after
    the update.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        pieces: Sequence[Piece],
        compute: Callable[[Piece], Tensor],  # 1-D view of a piece's compute weights
        home: StateHome,
        optimizer: Optimizer,
    ) -> None:
        self._blueprint, self._updates = blueprint, optimizer.updates()
        self.all_pieces = tuple(pieces)
        self.pieces = tuple(piece for piece in pieces if piece.local is not None)
        self._compute = {piece: compute(piece) for piece in pieces}
        self._weights = {piece: self._compute[piece] for piece in self.pieces if not blueprint.has_master(piece.run)}
        self._home = home
        home.expect(self.pieces)
        self._keep_masters()
        elements = sum(len(piece.range) for piece in self.pieces)
        self.moments = {name: home.moments(elements) for name in optimizer.moments}
        self.steps = [0] * len(blueprint.layout.entries)  # updates applied, by parameter number; the same on every rank
        self._stretches: tuple[int, list[Stretch]] = (-1, [])
        self.root_last = False  # update the root unit after all others: where its sums are the last to come

    def _keep_masters(self) -> None:
        kept = [piece for piece in self.pieces if self._blueprint.has_master(piece.run)]
        memory = self._home.masters(sum(len(piece.range) for piece in kept))
        start = 0
        for piece in kept:
            self._weights[piece] = memory[start : start + len(piece.range)]
            start += len(piece.range)

    def fill(self, unit: int, value_of: Callable[[Entry], Tensor]) -> None:
        """Take a unit's masters from `value_of` (each parameter's first values), before anything is rounded."""
        for piece in (piece for piece in self.pieces if piece.unit == unit):
            if self._blueprint.has_master(piece.run):
                write_values(self._blueprint.layout, piece.run, piece.range, self._weights[piece], value_of)

    def refresh_compute(self) -> None:
        """Cast every master weight down: after masters were written from outside."""
        for piece in self.pieces:
            if self._blueprint.has_master(piece.run):
                self._compute[piece].copy_(self._weights[piece])

    def tensors(self, run: int, part: Range) -> dict[str, Tensor]:
        """Views of the state of flat elements `part` of `run`: "parameter" (fp32 master; a frozen run's own dtype),
        and each moment (fp32) where trainable. Writing to them changes the state; then call `refresh_compute`.
        """
        piece = next(item for item in self.all_pieces if item.run == run and len(item.range.meet(part)) == len(part))
        near = slice(part.start - piece.range.start, part.stop - piece.range.start)
        if piece.local is None:
            return {"parameter": self._compute[piece][near]}
        own = slice(piece.local + near.start, piece.local + near.stop)
        return {"parameter": self._weights[piece][near], **{name: all_[own] for name, all_ in self.moments.items()}}

    def update(
        self,
        totals: Callable[[Piece, Range], Tensor],
        scale: float,
        lrs: Sequence[float],
        touched: int,
        updated: Callable[[int], None] = lambda unit: None,
    ) -> None:
        """One optimizer step. `totals`: a piece and elements counted from its start -> their 1-D fp32 sums.

        `scale` multiplies the sums once, in fp32; `touched` has a bit per parameter, the others stay as they are.
        `updated` is told a unit when it and all before it are as they will be.
        """
        unit = -1
        for each in self._stretches_of(touched):
            if each.piece.unit > unit >= 0:
                self._home.fence()
                updated(unit)
            unit = each.piece.unit
            gradient = self._home.scaled(each.piece, each.part, totals, scale)
            update, _ = self._updates[each.group]
            update(each.weight, gradient, each.moments, self.steps[each.ordinal] + 1, lrs[each.group])
            if each.compute is not None:
                self._home.hand_back(each.compute, each.weight)
        self._home.rest()
        for entry in self._blueprint.layout.entries:
            self.steps[entry.ordinal] += touched >> entry.ordinal & 1

    def skip(self) -> None:
        """There is no update in this step: its sums may be written over."""
        self._home.rest()

    def _stretches_of(self, touched: int) -> list[Stretch]:
        """Of a set of touched parameters. Valid while the same set comes again: counts move together."""
        if self._stretches[0] != touched:
            self._stretches = (touched, [each for span in self._cut_spans(touched) for each in self._strides_of(span)])
        return self._stretches[1]

    def _strides_of(self, span: Span) -> Iterator[Stretch]:
        piece, run, stride = self.pieces[span.piece], self.pieces[span.piece].run, self._home.stride
        group, apart = self._blueprint.layout.runs[run].group, self._blueprint.has_master(run)
        assert piece.local is not None
        for start in range(span.start, span.stop, stride):
            part = Range(start, min(start + stride, span.stop))
            near = slice(part.start, part.stop)
            moments = [all_[piece.local + near.start : piece.local + near.stop] for all_ in self.moments.values()]
            compute = self._compute[piece][near] if apart else None
            yield Stretch(piece, part, span.ordinal, group, self._weights[piece][near], moments, compute)

    def _cut_spans(self, touched: int) -> list[Span]:
        spans = list[Span]()
        for number, piece in sorted(enumerate(self.pieces), key=lambda item: self.root_last and item[1].unit == 0):
            entries = [entry for entry in self._blueprint.layout.entries_of(piece.unit) if entry.run == piece.run]
            ends = [entry.start for entry in entries[1:]] + [self._blueprint.layout.runs[piece.run].stop]
            for entry, end in zip(entries, ends, strict=True):
                part = Range(entry.start, end).meet(piece.range)
                if not len(part) or not touched >> entry.ordinal & 1:
                    continue
                start, stop = part.start - piece.range.start, part.stop - piece.range.start
                last = spans[-1] if spans else None
                if last and (last.piece, last.stop) == (number, start) and self._same_count(last, entry.ordinal):
                    spans[-1] = Span(number, last.start, stop, last.ordinal)
                else:
                    spans.append(Span(number, start, stop, entry.ordinal))
        return spans

    def _same_count(self, span: Span, ordinal: int) -> bool:
        return self.steps[span.ordinal] == self.steps[ordinal]

    def forget_spans(self) -> None:
        """Step counts were written from outside."""
        self._stretches = (-1, [])
