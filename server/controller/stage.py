"""`zero.stage: auto` becomes a number before an attempt starts, for the slots that it will get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

from server.controller.actions import Start
from workers.planner import Where
from workers.planner import resolve_stage as plan_stage
from workers.spec import JobSpec

Resolve = Callable[[JobSpec, Start], JobSpec]  # the spec with a stage; raises what makes it impossible to run


def resolve_stage(spec: JobSpec, start: Start) -> JobSpec:
    """The spec with its stage as a number: least traffic that fits, then least bytes. Raises as the planner does."""
    device = cast(Literal["cpu", "cuda"], start.device)
    return plan_stage(spec, Where(device=device, device_memory_bytes=start.slot_memory_bytes, one_node=start.one_node))
