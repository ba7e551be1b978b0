"""The plan of a user's model as another process makes it (`workers/model_plan.py`): their code never runs in this one.

Torch-free. Here too: how `zero.stage: auto` becomes a number, for which such a model has to be built.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.planner import SpecPlan, Where, plan_spec
from workers.spec import JobSpec, PythonModel

BUILD_SECONDS = 120.0
STAGE_OF_UNKNOWN_MODEL = 1  # stage 0's traffic at any number of micro-batches, with fewer bytes
COMMAND = (sys.executable, "-P", "-m", "workers.model_plan")


class NotBuilt(Exception):
    """The model could not be built or measured; the text is what its process said."""


@dataclass(frozen=True)
class Resolved:
    """A spec whose stage is a number."""

    spec: JobSpec
    plan: SpecPlan | None = None  # that the stage was taken from
    why: str | None = None  # the sentence that says why; None where the spec itself names the stage


def question_of(spec: JobSpec, ranks: Sequence[int], where: Where) -> str:
    """What the process reads from its standard input."""
    asked = {"spec": spec.model_dump(mode="json"), "ranks": list(ranks), "where": where.model_dump(mode="json")}
    return json.dumps(asked)


def plans_of_built(spec: JobSpec, ranks: Sequence[int], where: Where, seconds: float = BUILD_SECONDS) -> list[SpecPlan]:
    """A plan for each number of ranks, after a few seconds. Raises NotBuilt."""
    try:
        run = subprocess.run(
            COMMAND, input=question_of(spec, ranks, where), capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise NotBuilt(f"It was not built within {seconds:.0f} s.") from error
    if run.returncode != 0:
        raise NotBuilt(run.stderr.strip() or f"Its process ended with code {run.returncode}.")
    answers: list[dict[str, Any]] = json.loads(run.stdout)
    return [SpecPlan.model_validate(answer) for answer in answers]


def resolve_stage(spec: JobSpec, where: Where) -> Resolved:
    """`auto` takes the least traffic that fits, then the fewest bytes. Raises DataError for data without its facts.

    A user's model is built for that, without memory; one that cannot be gets a stage that never sends more than
    another, and its ranks will say what is wrong with it.
    """
    if spec.zero.stage != "auto":
        return Resolved(spec)
    try:
        unknown = isinstance(spec.model, PythonModel)
        plan = plans_of_built(spec, [spec.resources.ranks], where)[0] if unknown else plan_spec(spec, where)
        return Resolved(_at(spec, plan.advised_stage), plan, plan.advice)
    except NotBuilt as error:
        stage, last = STAGE_OF_UNKNOWN_MODEL, str(error).splitlines()[-1][:200]
        why = f"Stage {stage}, which never sends more than another: the model could not be planned ({last})."
        return Resolved(_at(spec, stage), None, why)


def _at(spec: JobSpec, stage: int) -> JobSpec:
    return spec.model_copy(update={"zero": spec.zero.model_copy(update={"stage": stage})})
