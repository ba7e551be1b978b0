"""The learning rate of a step: a pure function, so a resume goes on where it was. Torch-free."""

from __future__ import annotations

import math

from workers.spec import ConstantSchedule, TrainSpec


def learning_rate(train: TrainSpec, completed: int) -> float:
    """The rate of the step after `completed` ones: linear up to `lr`, then half a cosine to `min_lr` at the last."""
    peak, schedule = train.optimizer.lr, train.schedule
    if isinstance(schedule, ConstantSchedule):
        return peak
    step = completed + 1
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    done = min(1.0, (step - schedule.warmup_steps) / max(1, train.steps - schedule.warmup_steps))
    return schedule.min_lr + 0.5 * (peak - schedule.min_lr) * (1 + math.cos(math.pi * done))
