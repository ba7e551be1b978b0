"""The plan of a user's model as another process makes it (`workers/model_builder.py`). Torch-free.

Here too: how `zero.stage: auto` becomes a number, for which such a model has to be built.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from workers.data.errors import DataError
from workers.model_builder import ModelBuilder, NotBuilt, storable
from workers.planner import NeedsModel, SpecPlan, StagePlan, Where, plan_spec
from workers.spec import JobSpec

BUILD_SECONDS = 120.0
STAGE_OF_UNKNOWN_MODEL = 1  # stage 0's traffic at any number of micro-batches, with fewer bytes


@dataclass(frozen=True)
class Resolved:
    """A spec whose stage is a number."""

    spec: JobSpec
    plan: SpecPlan | None = None  # that the stage was taken from
    why: str | None = None  # the sentence that says why; None where the spec itself names the stage


async def plan_of(spec: JobSpec, where: Where, builder: ModelBuilder | None = None) -> SpecPlan:
    """The plan of any spec; `builder` as for `plans_of_built`.

    Raises NotBuilt for a user's model that cannot be built, DataError for data without its facts.
    """
    try:
        return await asyncio.to_thread(plan_spec, spec, where)
    except NeedsModel:
        return (await plans_of_built(spec, [spec.resources.ranks], where, builder))[0]


async def plans_of_built(
    spec: JobSpec,
    ranks: Sequence[int],
    where: Where,
    builder: ModelBuilder | None = None,
    seconds: float | None = None,
) -> list[SpecPlan]:
    """A plan for each number of ranks, within `seconds` (BUILD_SECONDS). Raises NotBuilt.

    What was started ends with this call, also when it is cancelled, and with the process that made it. `builder`: one
    that is kept for further models; without it one is made for this.
    """
    if builder is None:
        async with ModelBuilder() as once:
            return await plans_of_built(spec, ranks, where, once, seconds)
    bound = BUILD_SECONDS if seconds is None else seconds
    question = {"spec": spec.model_dump(mode="json"), "ranks": list(ranks), "where": where.model_dump(mode="json")}
    try:
        async with asyncio.timeout(bound):
            answer = await builder.ask(question)
    except TimeoutError as error:
        raise NotBuilt(f"It was not built within {bound:g} s.") from error
    if isinstance(answer, str):
        raise NotBuilt(storable(answer))
    return [SpecPlan.model_validate(plan) for plan in answer]


def resolve_stage(spec: JobSpec, where: Where) -> Resolved:
    """`auto` takes the least traffic that fits, then the fewest bytes. Raises DataError for data without its facts.

    A user's model is built for that, without memory; one that cannot be gets a stage that never sends more than
    another, and its ranks will say what is wrong with it.
    """
    if spec.zero.stage != "auto":
        return Resolved(spec)
    try:
        plan = asyncio.run(plan_of(spec, where))
        return Resolved(at_stage(spec, plan.advised_stage), plan, plan.advice)
    except NotBuilt as error:
        stage, last = STAGE_OF_UNKNOWN_MODEL, str(error).splitlines()[-1][:200]
        why = f"Stage {stage}, which never sends more than another: the model could not be planned ({last})."
        return Resolved(at_stage(spec, stage), None, why)


def predicted_stage(resolved: Resolved, where: Where) -> StagePlan | None:
    """The plan of the resolved spec's stage, with its predicted step; None on a machine that was not calibrated, for a
    user's model that cannot be built, and for data that the ranks have complained about. A user's model takes seconds.
    """
    if where.rates is None:
        return None
    try:
        plan = resolved.plan or asyncio.run(plan_of(resolved.spec, where))
        return next(each for each in plan.stages if each.stage == resolved.spec.zero.stage)
    except (NotBuilt, DataError, OSError):
        return None


def at_stage(spec: JobSpec, stage: int) -> JobSpec:
    """The spec with this stage."""
    return spec.model_copy(update={"zero": spec.zero.model_copy(update={"stage": stage})})
