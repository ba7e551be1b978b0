"""Which micro-batch or parameter made a step non-finite."""

from __future__ import annotations

import math

import torch

from zero_engine.layout import Layout
from zero_engine.mail import Outcome


def blame(layout: Layout, outcome: Outcome, step: int) -> str:
    """One sentence that names the first non-finite loss, else the parameter of the first non-finite block."""
    bad = [index for index, loss in enumerate(outcome.losses) if not math.isfinite(loss)]
    if bad:
        return f"step {step}: the loss of micro-batch {bad[0]} is {outcome.losses[bad[0]]}"
    first = int(torch.nonzero(~torch.isfinite(outcome.block_sums))[0])
    return f"step {step}: the gradient of parameter '{_parameter_in(layout, first)}' (or a neighbour) is not finite"


def _parameter_in(layout: Layout, number: int) -> str:
    """A parameter in trainable block `number`, counted in flat order."""
    starts = [start for run in layout.runs if run.trainable for start in range(run.start, run.stop, layout.block)]
    end = starts[number] + layout.block
    return max((entry for entry in layout.entries if entry.start < end), key=lambda entry: entry.start).spec.name
