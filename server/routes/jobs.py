"""Jobs: submit, list, read, change, delete."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from server.auth import Member, Viewer, check_owner
from server.db import Tx
from server.errors import ApiError, invalid, not_found
from server.ids import new_id
from server.planning import predict
from server.routes import spec_body
from server.routes.state import ERRORS, Db, JobKey, TheSettings
from server.rows import actions, events, idempotency, job_views, jobs, new_jobs
from server.rows.idempotency import Submission, canonical_hash
from server.rows.job_views import JobQuery, Sort
from server.rows.jobs import JobRecord
from server.rows.new_jobs import NewJob
from server.states import Status
from server.texts import JobName
from server.views import JobPage, JobView

router = APIRouter(prefix="/v1", tags=["jobs"], responses=ERRORS)

IdempotencyKeyHeader = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=200,
        description="a repeat with the same body makes no second job",
    ),
]
PRIORITY_FIXED = (Status.STOPPING, Status.DELETING)


class JobPatch(BaseModel):
    """What may be changed of a job at any time."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: JobName | None = None
    tags: Annotated[list[Annotated[str, Field(min_length=1, max_length=100)]], Field(max_length=50)] | None = None
    priority: Annotated[int, Field(ge=0, le=100)] | None = None


async def answer(database: Db, job_id: str) -> JobView:
    """The job as it is now. Raises ApiError 404."""
    async with database.read() as connection:
        found = await job_views.detail(connection, job_id, database.now())
    if found is None:
        raise not_found("job", job_id)
    return found


def with_etag(response: Response, view: JobView) -> JobView:
    """Send the version along, for If-Match."""
    response.headers["ETag"] = f'"{view.version}"'
    return view


@router.post("/jobs", status_code=201, operation_id="createJob", openapi_extra=spec_body.OPENAPI)
async def create(
    request: Request,
    response: Response,
    who: Member,
    database: Db,
    settings: TheSettings,
    key: IdempotencyKeyHeader = None,
) -> JobView:
    """Submit a spec, as JSON or YAML. 201 for a new job; 200 when the Idempotency-Key had made it already."""
    body = await spec_body.read_spec(request, settings)
    plan = await predict(body.spec, database, settings.data_dir)
    new = NewJob(
        id=new_id(),
        owner=who.name,
        spec=body.spec,
        spec_yaml=body.text,
        stage=body.spec.zero.stage if body.spec.zero.stage != "auto" else (plan.advised_stage if plan else None),
        plan=None if plan is None else plan.model_dump(mode="json"),
    )
    body_hash = canonical_hash(body.spec.model_dump(mode="json"))
    submitted = await idempotency.submit(database, Submission(new, key, body_hash))
    response.headers["Location"] = f"/v1/jobs/{submitted.job_id}"
    if not submitted.created:
        response.status_code = 200
    return with_etag(response, await answer(database, submitted.job_id))


@router.get("/jobs", operation_id="listJobs")
async def list_jobs(
    who: Viewer,
    database: Db,
    status: Annotated[str | None, Query(description="one or several, by commas", examples=["running,queued"])] = None,
    q: Annotated[str, Query(max_length=200, description="part of a name, or of an id at its beginning or end")] = "",
    tag: Annotated[str | None, Query(max_length=100)] = None,
    owner: Annotated[str | None, Query(max_length=100)] = None,
    sort: Annotated[Sort, Query(description="minus: descending; an absent loss is last")] = "-created_at",
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=2000)] = None,
) -> JobPage:
    """One page of jobs."""
    query = JobQuery(read_statuses(status), q, tag, owner, sort, cursor, limit)
    async with database.read() as connection:
        return await job_views.page(connection, query)


def read_statuses(text: str | None) -> tuple[Status, ...]:
    """The statuses in a comma-separated filter. Raises ApiError 422."""
    names = [] if text is None else [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in set(Status):
            raise invalid("status", "must be of " + ", ".join(Status), value=name)
    return tuple(Status(name) for name in names)


@router.get("/jobs/{job_id}", operation_id="getJob")
async def get(response: Response, job_id: JobKey, who: Viewer, database: Db) -> JobView:
    """One job."""
    return with_etag(response, await answer(database, job_id))


@router.patch("/jobs/{job_id}", operation_id="patchJob")
async def patch(
    response: Response,
    job_id: JobKey,
    body: JobPatch,
    who: Member,
    database: Db,
    if_match: Annotated[str | None, Header(alias="If-Match", description="ETag of the job as you saw it")] = None,
) -> JobView:
    """Change name, tags or priority. 412 when somebody else changed the job since the ETag in If-Match."""

    async def work(tx: Tx) -> None:
        job = await locked(tx, job_id)
        check_owner(who, job.owner)
        _check_version(job, if_match)
        if body.priority is not None and job.status in PRIORITY_FIXED:
            detail = f"The priority of a job that is {job.status} has no effect any more."
            raise ApiError(409, detail, code="illegal_change", job_status=job.status)
        await _apply(tx, job, body, who.name)

    await database.transact(work)
    return with_etag(response, await answer(database, job_id))


@router.delete("/jobs/{job_id}", status_code=202, operation_id="deleteJob")
async def delete(response: Response, job_id: JobKey, who: Member, database: Db) -> JobView:
    """Remove an ended job with its checkpoints, metrics and logs; it is `deleting` until all is gone.

    409 while a fork needs one of its checkpoints.
    """

    async def work(tx: Tx) -> None:
        job = await locked(tx, job_id)
        check_owner(who, job.owner)
        await actions.delete(tx, job, who)

    await database.transact(work)
    return with_etag(response, await answer(database, job_id))


async def locked(tx: Tx, job_id: str) -> JobRecord:
    """The job, kept from changing until the transaction ends. Raises ApiError 404."""
    job = await jobs.lock(tx, job_id)
    if job is None:
        raise not_found("job", job_id)
    return job


def _check_version(job: JobRecord, if_match: str | None) -> None:
    if if_match is None or if_match.strip() == "*":
        return
    versions = {tag.strip().removeprefix("W/").strip('"') for tag in if_match.split(",")}
    if str(job.version) not in versions:
        raise ApiError(412, f"The job has changed: it is at version {job.version}. Read it again.")


async def _apply(tx: Tx, job: JobRecord, body: JobPatch, name: str) -> None:
    changed: dict[str, Any] = {k: v for k, v in body.model_dump(exclude_none=True).items() if job.spec.get(k) != v}
    if not changed:
        return
    columns = dict(changed)
    if "name" in changed:
        columns["name_folded"] = new_jobs.fold(changed["name"])
    if "tags" in changed:
        await new_jobs.set_tags(tx, job.id, changed["tags"])
    await jobs.set_values(tx, job.id, **columns, spec={**job.spec, **changed})
    if "priority" in changed:
        tx.changed("queue")
    await events.append(
        tx, job.id, "job.changed", f"{name} changed {', '.join(changed)}.", actor=f"user:{name}", data=changed
    )
