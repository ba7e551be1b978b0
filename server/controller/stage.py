"""`zero.stage: auto` becomes a number before an attempt starts, for the slots that it will get."""

from __future__ import annotations

from typing import Literal, cast

from server.controller.actions import Start
from server.views import PlanView
from workers.built_plan import STAGE_OF_UNKNOWN_MODEL, at_stage
from workers.planner import NeedsModel, Where, plan_spec
from workers.spec import JobSpec


def resolve_stage(spec: JobSpec, start: Start, made: PlanView | None) -> JobSpec:
    """The spec with its stage as a number: least traffic that fits, then least bytes. Raises as the planner does.

    `made`: the plan that the job has; a user's model without one gets a stage that never sends more than another, and
    its ranks will say what is wrong with it.
    """
    if spec.zero.stage != "auto":
        return spec
    device = cast(Literal["cpu", "cuda"], start.device)
    where = Where(device=device, device_memory_bytes=start.slot_memory_bytes, one_node=start.one_node)
    try:
        return at_stage(spec, plan_spec(spec, where).advised_stage)
    except NeedsModel:
        return at_stage(spec, STAGE_OF_UNKNOWN_MODEL if made is None else made.advised_stage)
