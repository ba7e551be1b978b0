"""`zero.stage: auto` becomes a number before an attempt starts, for the slots that it will get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast

from server.controller.actions import Start
from workers import built_plan
from workers.built_plan import Resolved
from workers.calibrations import known_calibration
from workers.planner import Where
from workers.spec import JobSpec

Resolve = Callable[[JobSpec, Start], Resolved]  # the spec with a stage; raises what makes it impossible to run


def resolve_stage(data_dir: Path, spec: JobSpec, start: Start) -> Resolved:
    """The spec with its stage as a number: least traffic that fits, then least bytes. Raises as the planner does.

    A user's model is built, without memory, in a process of its own first (a few seconds); its plan predicts a step
    where `data_dir` has a calibration of these slots.
    """
    device = cast(Literal["cpu", "cuda"], start.device)
    known = known_calibration(data_dir, device, spec.resources.threads_per_rank)
    where = Where(
        device=device,
        device_memory_bytes=start.slot_memory_bytes,
        one_node=start.one_node,
        rates=known.rates,
        rates_note=known.note,
    )
    return built_plan.resolve_stage(spec, where)
