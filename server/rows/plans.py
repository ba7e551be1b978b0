"""Plans: of jobs, and of specs whose model a rank process has to build first."""

from __future__ import annotations

from statistics import median
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.ids import new_id
from server.models import Attempt, Job, PlanRequest, PointTail, Series, SeriesStats
from server.views import JobPlanView, PendingPlan, PlanView
from workers.spec import JobSpec


async def of_job(connection: AsyncConnection, job_id: str, attempt: int | None) -> JobPlanView | None:
    """The predicted plan of a job and the engine's of an attempt (default: the newest); None without the job."""
    job = (
        await connection.execute(select(Job.plan, Job.chunk, Job.stage, Job.attempt).where(Job.id == job_id))
    ).one_or_none()
    if job is None:
        return None
    wanted = attempt or job.attempt
    statement = select(Attempt.plan_memory, Attempt.plan_traffic, Attempt.parameters, Attempt.stage).where(
        Attempt.job_id == job_id, Attempt.number == wanted
    )
    row = (await connection.execute(statement)).one_or_none()
    predicted = None if job.plan is None else PlanView.model_validate(job.plan)
    stage = job.stage if row is None else row.stage
    expected, measured = _expected(predicted, stage), await _measured(connection, job_id, wanted)
    return JobPlanView(
        job_id=job_id,
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


def _expected(plan: PlanView | None, stage: int | None) -> float | None:
    """Seconds of a step at this stage."""
    found = [each.step_seconds for each in plan.stages if each.stage == stage] if plan is not None else []
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


async def request(tx: Tx, owner: str, spec: JobSpec) -> str:
    """Ask for the plan of a user's model; returns the id of the result."""
    request_id = new_id()
    values = {"id": request_id, "owner": owner, "spec": spec.model_dump(mode="json"), "status": "pending"}
    await tx.execute(insert(PlanRequest).values(**values, created_at=tx.now))
    return request_id


async def finish(tx: Tx, request_id: str, *, result: dict[str, Any] | None = None, error: str | None = None) -> None:
    """Store the plan, or why there is none."""
    status = "done" if error is None else "failed"
    await tx.execute(
        update(PlanRequest).where(PlanRequest.id == request_id).values(status=status, result=result, error=error)
    )


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
