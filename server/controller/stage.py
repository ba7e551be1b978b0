"""`zero.stage: auto` becomes a number before an attempt starts, for the slots that it will get."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Literal, cast

from server.controller.actions import Start
from workers.planner import Where
from workers.planner import resolve_stage as plan_stage
from workers.spec import JobSpec

log = logging.getLogger("shardyard.controller")
Resolve = Callable[[JobSpec, Start], JobSpec]  # the spec with a stage; raises what makes it impossible to run
BUILD_SECONDS = 120.0


def resolve_stage(spec: JobSpec, start: Start) -> JobSpec:
    """The spec with its stage as a number: least traffic that fits, then least bytes. Raises as the planner does.

    A user's model for GPUs is built, without memory, in a process of its own first (a few seconds): what fits there
    decides. Elsewhere, and where it cannot be planned, it gets the stage that never sends more than another.
    """
    device = cast(Literal["cpu", "cuda"], start.device)
    where = Where(device=device, device_memory_bytes=start.slot_memory_bytes, one_node=start.one_node)
    unknown = spec.model.kind == "python" and spec.zero.stage == "auto"
    if unknown and device == "cuda" and start.slot_memory_bytes is not None:
        stage = _stage_of_built_model(spec, where)
        if stage is not None:
            return spec.model_copy(update={"zero": spec.zero.model_copy(update={"stage": stage})})
    return plan_stage(spec, where)


def _stage_of_built_model(spec: JobSpec, where: Where) -> int | None:
    """The advised stage; None when the model cannot be planned."""
    question = {
        "spec": spec.model_dump(mode="json"),
        "ranks": [spec.resources.ranks],
        "where": where.model_dump(mode="json"),
    }
    command = [sys.executable, "-P", "-m", "workers.model_plan"]
    try:
        run = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=BUILD_SECONDS, check=True
        )
        return int(json.loads(run.stdout)[0]["advised_stage"])
    except (subprocess.SubprocessError, OSError, ValueError, LookupError) as error:
        log.info("stage.not_planned job=%s reason=%s", spec.name, type(error).__name__)
        return None
