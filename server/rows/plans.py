"""Plans of jobs, and the requests for those that take time: a user's model has to be built first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

from sqlalchemy import Select, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.ids import new_id
from server.models import Attempt, Job, PlanRequest, PointTail, Series, SeriesStats
from server.rows import events
from server.states import ACTIVE
from server.views import JobPlanView, PendingPlan, PlanView

KEPT = timedelta(days=1)  # the answer to somebody who asked about a spec
LOOKED_AT = 100  # waiting requests
UNSEEN = ("steps", "seed", "schedule", "eval")  # of `train`: what changes nothing in a plan
PLANNED = ("model", "data", "train", "zero", "resources")  # sections of a spec that a plan is made from
WANTED = Job.status.in_(ACTIVE) | (Job.attempt > 0)  # one that was cancelled before its first attempt needs no plan


@dataclass(frozen=True)
class Waiting:
    """A plan that is asked for and not made yet."""

    id: str
    job_id: str | None  # None: somebody asks about a spec
    spec: Mapping[str, Any]


def plan_key(spec: Mapping[str, Any]) -> str:
    """The same for specs that have one plan: it covers all stages, and the learning rate changes nothing in it."""
    parts = {name: spec[name] for name in PLANNED}
    train = {name: value for name, value in spec["train"].items() if name not in UNSEEN}
    parts["train"] = {**train, "optimizer": {**train["optimizer"], "lr": None}}
    parts["zero"] = {**spec["zero"], "stage": None}
    return json.dumps(parts, sort_keys=True)


async def of_job(connection: AsyncConnection, job_id: str, attempt: int | None = None) -> JobPlanView | None:
    """The predicted plan of a job and the engine's of an attempt (default: the newest); None without the job."""
    statement = (
        select(Job.plan, Job.chunk, Job.stage, Job.attempt, PlanRequest.status, PlanRequest.error)
        .outerjoin(PlanRequest, (PlanRequest.job_id == Job.id) & ((PlanRequest.status != "pending") | WANTED))
        .where(Job.id == job_id)
    )
    job = (await connection.execute(statement)).one_or_none()
    if job is None:
        return None
    wanted = attempt or job.attempt
    columns = (Attempt.plan_memory, Attempt.plan_traffic, Attempt.parameters, Attempt.stage, Attempt.ranks)
    row = (
        await connection.execute(select(*columns).where(Attempt.job_id == job_id, Attempt.number == wanted))
    ).one_or_none()
    predicted = None if job.plan is None else PlanView.model_validate(job.plan)
    stage = job.stage if row is None else row.stage
    expected = _expected(predicted, stage, None if row is None else row.ranks)
    measured = await _measured(connection, job_id, wanted)
    return JobPlanView(
        job_id=job_id,
        status=job.status if predicted is None else "done",
        failure=job.error,
        predicted=predicted,
        attempt=None if row is None else wanted,
        memory=[] if row is None else row.plan_memory or [],
        traffic=[] if row is None else row.plan_traffic or [],
        stage=stage,
        chunk=job.chunk,
        parameters=None if row is None else row.parameters,
        predicted_seconds=expected,
        measured_seconds=measured,
        error=None if expected is None or measured is None else expected / measured - 1,
    )


def _expected(plan: PlanView | None, stage: int | None, ranks: int | None) -> float | None:
    """Seconds of a step at this stage, when the plan is of so many ranks (None: there is no attempt yet)."""
    if plan is None or ranks not in (None, plan.ranks):
        return None
    found = [each.step_seconds for each in plan.stages if each.stage == stage]
    return found[0].total if found and found[0] is not None else None


async def _measured(connection: AsyncConnection, job_id: str, attempt: int) -> float | None:
    """Median seconds of the newest steps that an attempt reported: those not sealed yet, else the last one."""
    own = (Series.job_id == job_id, Series.attempt == attempt, Series.name == "seconds")
    tail = select(PointTail.value).join(Series, Series.id == PointTail.series_id).where(*own)
    values = [value for value in (await connection.execute(tail)).scalars() if value is not None]
    if values:
        return median(values)
    last = select(SeriesStats.last).join(Series, Series.id == SeriesStats.series_id).where(*own)
    return (await connection.execute(last)).scalars().first()


async def request(tx: Tx, owner: str, spec: Mapping[str, Any], job_id: str | None = None) -> str:
    """Ask for a plan, in the place of an earlier one of the job; returns the id of the result."""
    old = PlanRequest.job_id.is_(None) & (PlanRequest.created_at < tx.now - KEPT)
    await tx.execute(delete(PlanRequest).where(old if job_id is None else PlanRequest.job_id == job_id))
    request_id = new_id()
    values = {"id": request_id, "job_id": job_id, "owner": owner, "spec": dict(spec), "status": "pending"}
    await tx.execute(insert(PlanRequest).values(**values, created_at=tx.now))
    tx.work()
    return request_id


async def renew(tx: Tx, owner: str, job_id: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Ask for the plan of a job that goes on: with another spec, or because none could be made, or nobody asked."""
    known = select(Job.id).outerjoin(PlanRequest, PlanRequest.job_id == Job.id)
    known = known.where(Job.id == job_id, Job.plan.is_not(None) | (PlanRequest.status == "pending"))
    same = plan_key({**old, "train": new["train"]}) == plan_key(new)  # a resume keeps the chunk, as a number
    if same and (await tx.execute(known)).one_or_none() is not None:
        return
    await tx.execute(update(Job).where(Job.id == job_id).values(plan=None))
    await request(tx, owner, new, job_id)


async def unplanned(connection: AsyncConnection) -> frozenset[str | None]:
    """Jobs whose plan is not made yet; with None among them where somebody waits for the plan of a spec."""
    return frozenset((await connection.execute(_wanted(PlanRequest.job_id))).scalars())


async def waiting(connection: AsyncConnection) -> list[Waiting]:
    """What is asked for and not made yet, the first LOOKED_AT."""
    statement = _wanted(PlanRequest.id, PlanRequest.job_id, PlanRequest.spec)
    statement = statement.order_by(PlanRequest.created_at, PlanRequest.id).limit(LOOKED_AT)
    return [Waiting(*row) for row in (await connection.execute(statement)).all()]


def _wanted(*columns: Any) -> Select[Any]:
    statement = select(*columns).outerjoin(Job, Job.id == PlanRequest.job_id)
    return statement.where(PlanRequest.status == "pending", PlanRequest.job_id.is_(None) | WANTED)


async def finish(tx: Tx, asked: Waiting, *, result: Mapping[str, Any] | None = None, error: str | None = None) -> None:
    """Store the plan, a job's with the job, or why there is none."""
    values = {"status": "done" if error is None else "failed", "error": error}
    of_spec = {"result": result} if asked.job_id is None else {}
    await tx.execute(update(PlanRequest).where(PlanRequest.id == asked.id).values(**values, **of_spec))
    if asked.job_id is None:
        return
    if error is None:
        assert result is not None
        stage = func.coalesce(Job.stage, result["advised_stage"])
        await tx.execute(update(Job).where(Job.id == asked.job_id).values(plan=result, stage=stage))
    else:
        message = f"No plan can be made: {error.splitlines()[-1]}"
        await events.append(tx, asked.job_id, "plan.failed", message, actor="controller", data={"error": error})
    tx.changed("ledger", asked.job_id)
    tx.changed("job", asked.job_id)
    tx.work()


async def pending(connection: AsyncConnection, request_id: str) -> PendingPlan | None:
    """A plan that was asked for."""
    row = (await connection.execute(select(PlanRequest.__table__).where(PlanRequest.id == request_id))).one_or_none()
    if row is None:
        return None
    return PendingPlan(
        id=row.id,
        status=row.status,
        href=f"/v1/plans/{row.id}",
        plan=None if row.result is None else PlanView.model_validate(row.result),
        error=row.error,
    )
