"""What a step found: of the engine and of the reference loop."""

from __future__ import annotations

from dataclasses import dataclass, field

ACTIVATIONS = "activations"  # the category of what is not the engine's


@dataclass(frozen=True)
class StepResult:
    """What a step found; the same on every rank, except seconds and bytes."""

    loss: float  # mean over the step's micro-batches, weighted where weights were given
    grad_norm: float  # of the mean gradient, before clipping
    skipped: bool  # a loss or gradient was not finite: nothing was updated
    flag: int  # the largest flag that any rank gave
    seconds: dict[str, float]  # this rank's time by phase: forward, backward, reduce, update, gather
    bytes: dict[str, int]  # this rank's payload bytes by "collective/purpose"
    problem: str = ""  # what was not finite: the step, and the micro-batch or the parameter
    hidden_seconds: float = 0.0  # messages were on their way for so long while this rank computed; not in `seconds`
    memory: dict[str, dict[str, int]] = field(default_factory=dict)  # bytes by phase and category; see `watch_memory`
