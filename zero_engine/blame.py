"""Which micro-batch or parameter made a step non-finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zero_engine.agree import Agreement
from zero_engine.layout import Layout, Piece, Range
from zero_engine.mail import Outcome
from zero_engine.strategy import Totals


def blame(outcome: Outcome, layout: Layout, pieces: Sequence[Piece], totals: Totals, agreement: Agreement) -> str:
    """What was not finite, the same words on every rank: they tell each other what they see in their `pieces`."""
    return _bad_loss(outcome) or next(
        filter(None, agreement.tell(_bad_gradient(layout, pieces, totals), "what is not finite")),
        "the gradient norm is not finite",
    )


def _bad_loss(outcome: Outcome) -> str:
    """The first micro-batch whose loss is not finite, or that all weigh nothing, in words; the same on every rank."""
    bad = [index for index, loss in enumerate(outcome.losses) if not math.isfinite(loss)]
    if bad:
        return f"the loss of micro-batch {bad[0]} is {outcome.losses[bad[0]]}"
    return "" if any(outcome.weights) else "the weights of all losses are 0"


def _bad_gradient(layout: Layout, pieces: Sequence[Piece], totals: Totals) -> str:
    """The first parameter among `pieces` whose summed gradient is not finite, in words. Empty without one."""
    for piece in pieces:
        bad = torch.isfinite(totals(piece, Range(0, len(piece.range)))).logical_not_().nonzero()
        if len(bad):
            place = piece.range.start + int(bad[0])
            entries = [e for e in layout.entries_of(piece.unit) if e.run == piece.run and e.start <= place]
            return f"the gradient of parameter '{max(entries, key=lambda entry: entry.start).spec.name}' is not finite"
    return ""
