"""What people do to jobs: cancel, kill, pause, resume; and cancel for many."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from server.auth import Member, check_owner
from server.db import Database, Tx
from server.errors import ApiError
from server.ids import is_id
from server.routes.jobs import answer, locked, read_statuses, with_etag
from server.routes.state import ERRORS, Db, JobKey, TheSettings
from server.rows import actions, job_views, jobs
from server.rows.job_views import JobQuery
from server.rows.users import Principal
from server.states import Action, Status
from server.views import ActionResult, BulkResult, JobView
from workers.contract import ResumeRequest

router = APIRouter(prefix="/v1", tags=["actions"], responses=ERRORS)

AT_ONCE = 500  # jobs of one transaction of a bulk action


class JobFilter(BaseModel):
    """The jobs that a list with the same filters shows."""

    model_config = ConfigDict(extra="forbid")

    status: Annotated[str | None, Field(examples=["queued,running"])] = None
    q: Annotated[str, Field(max_length=200)] = ""
    tag: Annotated[str | None, Field(max_length=100)] = None
    owner: Annotated[str | None, Field(max_length=100)] = None


class BulkCancel(BaseModel):
    """Which jobs to cancel: by id, or all that a filter means at this moment."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"filter": {"status": "queued"}}]})

    ids: Annotated[list[str], Field(max_length=10_000)] | None = None
    filter: JobFilter | None = None


@router.post("/jobs/cancel", operation_id="cancelJobs")
async def cancel_many(body: BulkCancel, who: Member, database: Db) -> BulkResult:
    """Cancel many jobs; the answer has a result for each job that was covered."""
    if (body.ids is None) == (body.filter is None):
        raise ApiError(422, "Give either ids or filter.")
    wanted = body.ids if body.ids is not None else await _matching(database, body.filter or JobFilter())
    ids = list(dict.fromkeys(wanted))
    results: list[ActionResult] = []
    for start in range(0, len(ids), AT_ONCE):
        results += await _cancel(database, sorted(ids[start : start + AT_ONCE]), who)
    return BulkResult(results=results)


@router.post("/jobs/{job_id}/cancel", operation_id="cancelJob")
async def cancel(response: Response, job_id: JobKey, who: Member, database: Db) -> JobView:
    """Stop at the next step boundary with a checkpoint; `cancelled` when everything was released."""
    return await _do(response, Action.CANCEL, job_id, who, database)


@router.post("/jobs/{job_id}/kill", operation_id="killJob")
async def kill(response: Response, job_id: JobKey, who: Member, database: Db) -> JobView:
    """End every process at once; nothing is saved."""
    return await _do(response, Action.KILL, job_id, who, database)


@router.post("/jobs/{job_id}/pause", operation_id="pauseJob")
async def pause(response: Response, job_id: JobKey, who: Member, database: Db) -> JobView:
    """Stop as cancel does; the checkpoint is kept until the job runs again."""
    return await _do(response, Action.PAUSE, job_id, who, database)


@router.post("/jobs/{job_id}/resume", operation_id="resumeJob")
async def resume(
    response: Response,
    job_id: JobKey,
    who: Member,
    database: Db,
    settings: TheSettings,
    body: ResumeRequest | None = None,
) -> JobView:
    """Go on from the newest checkpoint or a named one; with other ranks, another stage or more steps when asked."""

    async def work(tx: Tx) -> None:
        job = await locked(tx, job_id)
        check_owner(who, job.owner)
        await actions.resume(tx, job, who, body or ResumeRequest(), settings.max_ranks)

    await database.transact(work)
    return with_etag(response, await answer(database, job_id))


async def _do(response: Response, action: Action, job_id: str, who: Principal, database: Database) -> JobView:
    async def work(tx: Tx) -> None:
        job = await locked(tx, job_id)
        check_owner(who, job.owner)
        await actions.act(tx, action, job, who)

    await database.transact(work)
    return with_etag(response, await answer(database, job_id))


async def _matching(database: Database, wanted: JobFilter) -> list[str]:
    query = JobQuery(read_statuses(wanted.status), wanted.q, wanted.tag, wanted.owner)
    async with database.read() as connection:
        return await job_views.ids_matching(connection, query)


async def _cancel(database: Database, ids: list[str], who: Principal) -> list[ActionResult]:
    """Waiting jobs of one owner end with one statement; the others are asked one by one."""
    ours = [job_id for job_id in ids if is_id(job_id)]

    async def work(tx: Tx) -> list[ActionResult]:
        ended = await actions.cancel_waiting(tx, ours, who)
        return [
            ActionResult(id=job_id, ok=True, status=Status.CANCELLED)
            if job_id in ended
            else await _cancel_one(tx, job_id, who)
            for job_id in ids
        ]

    return await database.transact(work)


async def _cancel_one(tx: Tx, job_id: str, who: Principal) -> ActionResult:
    job = await jobs.lock(tx, job_id) if is_id(job_id) else None
    if job is None:
        return ActionResult(id=job_id, ok=False, status=None, error="There is no such job.")
    try:
        check_owner(who, job.owner)
        outcome = await actions.act(tx, Action.CANCEL, job, who)
    except ApiError as error:
        return ActionResult(id=job_id, ok=False, status=job.status, error=str(error.detail))
    return ActionResult(id=job_id, ok=True, status=outcome.status)
