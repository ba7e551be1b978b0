"""Freezing and unfreezing between steps: the engine is built again around the weights it has.

Parameters that train before and after keep moments and step counts. What is frozen loses them, and with them its
gradient, sum and optimizer bytes; what is unfrozen starts as in a fresh build.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from zero_engine.agree import Agreement
from zero_engine.errors import DivergedError
from zero_engine.flat import write_values
from zero_engine.full import whole_parameters
from zero_engine.layout import Entry, Layout
from zero_engine.master import Master
from zero_engine.state import Subject


def require_equal_change(agreement: Agreement, layout: Layout, trained: Sequence[bool]) -> None:
    """Raises DivergedError when ranks freeze and unfreeze other parameters; collective, and ranks that do something
    else are told. `trained`: by number, whether the parameter trains from now on.
    """
    changed = [e.spec.name for e, now in zip(layout.canonical_entries, trained, strict=True) if now != e.spec.trainable]
    unlike = agreement.difference(changed, ", ".join(changed), "freezing or unfreezing parameters")
    if unlike:
        raise DivergedError(f"the parameters to freeze or unfreeze are {unlike}; do the same on all ranks")


@dataclass(frozen=True)
class Belongings:
    """Whole tensors by parameter name, on every rank."""

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]  # by kind
    steps: dict[str, int]


def belongings_of(subject: Subject) -> Belongings:
    """Gather everything that a new build starts from; collective."""
    layout = subject.layout
    weights = {entry.spec.name: values.clone() for entry, values in whole_parameters(subject)}
    moments = {
        kind: {e.spec.name: values.clone() for e, values in whole_parameters(subject, kind) if e.spec.trainable}
        for kind in subject.moments
    }
    return Belongings(
        weights, moments, {e.spec.name: subject.master.steps[e.ordinal] for e in layout.entries if e.spec.trainable}
    )


def lay_down(layout: Layout, parameters: Sequence[nn.Parameter], kept: Belongings) -> None:
    """Give every parameter memory of its own again, in the dtype the model was built with."""
    for entry in layout.canonical_entries:
        parameter = parameters[entry.ordinal]
        parameter.__class__ = nn.Parameter
        parameter.data = kept.weights[entry.spec.name].to(parameter.device, getattr(torch, entry.spec.dtype))


def take_up(layout: Layout, master: Master, kept: Belongings) -> None:
    """Put moments and counts of what trained before into a new build."""
    for piece in master.pieces:
        tensors = master.tensors(piece.run, piece.range)
        for kind, known in kept.moments.items():
            write_values(layout, piece.run, piece.range, tensors[kind], partial(_known_or_zeros, known))
    for entry in layout.entries:
        master.steps[entry.ordinal] = kept.steps.get(entry.spec.name, 0) if entry.spec.trainable else 0
    master.forget_spans()


def _known_or_zeros(known: dict[str, Tensor], entry: Entry) -> Tensor:
    return known[entry.spec.name] if entry.spec.name in known else torch.zeros(entry.spec.shape)
