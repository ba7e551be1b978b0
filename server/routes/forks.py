"""New jobs from old ones: a clone begins at step 0, a fork at a checkpoint of any job."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from server import forking
from server.auth import Member, Viewer
from server.controller import checkpoint_files
from server.db import Database, Tx
from server.errors import ApiError, not_found
from server.ids import new_id
from server.planning import predict, where_of
from server.preflight import Beginning, passed_over, preflight
from server.routes.jobs import IdempotencyKeyHeader, answer, with_etag
from server.routes.state import ERRORS, Db, JobKey, TheSettings
from server.routes.stored import store_answers
from server.rows import actions, checkpoints, idempotency, jobs, nodes
from server.rows.checkpoints import USABLE, CheckpointRef
from server.rows.idempotency import Submission, canonical_hash
from server.rows.jobs import JobRecord
from server.rows.new_jobs import Fork, NewJob
from server.settings import Settings
from server.states import Status
from server.texts import JobName
from server.views import JobView, PreflightView
from server.whole_store import whole_store
from workers.contract import ResumeRequest, ResumeTrain
from workers.object_store import open_store
from workers.planner import NeedsModel
from workers.spec import JobSpec, SpecError, ZeroSpec, path_problems
from zero_engine.manifest import Manifest

router = APIRouter(prefix="/v1", tags=["actions"], responses=ERRORS)

GOING = (Status.DELETING, Status.DELETE_FAILED)  # its checkpoints may be gone at any moment
Patch = Annotated[
    dict[str, Any], Field(description="JSON merge patch (RFC 7396) of the job's spec; null brings a default back")
]


class CloneRequest(BaseModel):
    """A new job from an old one's spec, from step 0; the chunk keeps its number, so that the bits can be compared."""

    model_config = ConfigDict(extra="forbid")

    name: JobName | None = None
    ranks: Annotated[int, Field(strict=True, ge=1, le=65536)] | None = None
    zero: ZeroSpec | None = None
    train: ResumeTrain | None = None
    spec: Patch = {}


class ForkRequest(BaseModel):
    """A new job that begins with the state of a checkpoint: weights, moments, step, schedule and place in the data."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"spec": {"train": {"steps": 600}, "zero": {"stage": 3}}}]}
    )

    checkpoint: str | None = Field(default=None, description="id of a checkpoint of this job; default: newest readable")
    name: JobName | None = None
    spec: Patch = {}


class PreflightRequest(ResumeRequest):
    """A resume, or with `spec` a fork, as it would be asked for."""

    spec: Patch = Field(default_factory=dict)


@router.post("/jobs/{job_id}/clone", status_code=201, operation_id="cloneJob")
async def clone(
    response: Response,
    job_id: JobKey,
    who: Member,
    database: Db,
    settings: TheSettings,
    body: CloneRequest | None = None,
    key: IdempotencyKeyHeader = None,
) -> JobView:
    """Submit the job's spec again as a new job, with changes where asked."""
    wish = body or CloneRequest()
    job, text = await _source(database, job_id)
    spec = await _changed(job, _clone_patch(wish), settings)
    new = NewJob(new_id(), who.name, spec, text, *await _planned(spec, database, settings), cloned_from=job_id)
    body_hash = canonical_hash(job_id, spec.model_dump(mode="json"))
    return await _submitted(response, database, Submission(new, key, body_hash))


@router.post("/jobs/{job_id}/fork", status_code=201, operation_id="forkJob")
async def fork(
    response: Response,
    job_id: JobKey,
    who: Member,
    database: Db,
    settings: TheSettings,
    body: ForkRequest | None = None,
    key: IdempotencyKeyHeader = None,
) -> JobView:
    """Begin a new job at a checkpoint of this one, with changes to the spec that its layout allows."""
    wish = body or ForkRequest()
    job, text = await _source(database, job_id)
    point = await _origin(database, settings, job, wish.checkpoint)
    patch = {**wish.spec, **({} if wish.name is None else {"name": wish.name})}
    spec = await _changed(job, patch, settings)
    forking.check_fits(spec, job.job_spec(), point.step)
    stage, plan = await _planned(spec, database, settings)
    new = NewJob(new_id(), who.name, spec, text, stage, plan, job_id, Fork(point.id, point.step))
    body_hash = canonical_hash(job_id, wish.checkpoint or "", spec.model_dump(mode="json"))
    return await _submitted(response, database, Submission(new, key, body_hash, _still_there(point)))


def _clone_patch(wish: CloneRequest) -> dict[str, Any]:
    patch: dict[str, Any] = dict(wish.spec)
    given = wish.model_dump(mode="json", include={"zero", "train"}, exclude_unset=True, exclude_none=True)
    if wish.name is not None:
        given["name"] = wish.name
    if wish.ranks is not None:
        given["resources"] = {"ranks": wish.ranks}
    return forking.merged(patch, given)


async def _source(database: Database, job_id: str) -> tuple[JobRecord, str]:
    """The job and its spec as submitted. Raises ApiError 404."""
    async with database.read() as connection:
        job = await jobs.get(connection, job_id)
        text = await jobs.submitted_text(connection, job_id)
    if job is None or text is None:
        raise not_found("job", job_id)
    return job, text


async def _changed(job: JobRecord, patch: dict[str, Any], settings: Settings) -> JobSpec:
    spec = forking.changed_spec(job.spec, job.chunk, patch)
    if spec.resources.ranks > settings.max_ranks:
        raise actions.too_many_ranks("/spec/resources/ranks", spec.resources.ranks, settings.max_ranks)
    old = job.job_spec()
    if (spec.model, spec.data) != (old.model, old.data):
        problems = path_problems(spec, settings.roots)
        if problems:
            raise SpecError(problems)
    return spec


async def _planned(spec: JobSpec, database: Database, settings: Settings) -> tuple[int | None, dict[str, Any] | None]:
    """The stage if it is known now, and the plan to show."""
    plan = await predict(spec, database, settings.data_dir)
    stage = spec.zero.stage if spec.zero.stage != "auto" else (plan.advised_stage if plan else None)
    return stage, None if plan is None else plan.model_dump(mode="json")


async def _point(database: Database, job: JobRecord, checkpoint_id: str | None) -> CheckpointRef:
    """The checkpoint to begin from. Raises ApiError 404, 409."""
    async with database.read() as connection:
        if checkpoint_id is None:
            found = await checkpoints.newest_usable(connection, job.id)
        else:
            found = await checkpoints.find(connection, checkpoint_id)
    if checkpoint_id is not None and (found is None or found.job_id != job.id):
        raise not_found("checkpoint of this job", checkpoint_id)
    if found is None:
        raise ApiError(409, "The job has no usable checkpoint; clone it to begin at step 0.", code="no_checkpoint")
    if found.status not in USABLE:
        raise forking.refused(found.step, found.status)
    return found


async def _origin(database: Database, settings: Settings, job: JobRecord, checkpoint_id: str | None) -> CheckpointRef:
    """The checkpoint to fork: the one that is named, else the newest whose manifest can be read.

    While the store does not answer it is the newest known: the fork waits for the store. Raises ApiError 404, 409.
    """
    point = await _point(database, job, checkpoint_id)
    async with database.read() as connection:
        choice = [point] if checkpoint_id is not None else await checkpoints.of_job(connection, job.id)
    try:
        begins, _ = await _newest_readable(database, settings, point, choice)
    except ApiError as error:
        if error.code != "store_unavailable":
            raise
        return point
    return begins.point


def _still_there(point: CheckpointRef) -> idempotency.Check:
    """Retention and deletion lock the job before they mark anything: what is there under the lock stays."""

    async def check(tx: Tx) -> None:
        owner = await jobs.lock(tx, point.job_id)
        found = await checkpoints.find(tx.connection, point.id)
        if owner is None or owner.status in GOING or found is None:
            raise forking.refused(point.step, "being removed")
        if found.status not in USABLE:
            raise forking.refused(found.step, found.status)

    return check


@router.post("/jobs/{job_id}/preflight", operation_id="preflightJob")
async def preflight_job(
    job_id: JobKey, who: Viewer, database: Db, settings: TheSettings, body: PreflightRequest | None = None
) -> PreflightView:
    """What a resume (or, with `spec`, a fork) would read per rank and need, and whether it fits; nothing is started."""
    wish = body or PreflightRequest()
    job, _ = await _source(database, job_id)
    spec = actions.resumed_spec(
        job, ResumeRequest(ranks=wish.ranks, zero=wish.zero, train=wish.train), settings.max_ranks
    )
    if wish.spec:
        spec = forking.changed_spec(spec.model_dump(mode="json"), job.chunk, wish.spec)
    async with database.read() as connection:
        existing = await checkpoints.of_job(connection, job.id)
        point = await checkpoints.beginning(connection, job.id) if wish.checkpoint is None else None
        where = where_of(spec, await nodes.views(connection))
    if wish.checkpoint is not None:
        point = await _point(database, job, wish.checkpoint)
    if point is None or wish.checkpoint is not None:
        begins = None if point is None else Beginning(point, await _manifest(database, settings, point))
    else:
        begins, existing = await _newest_readable(database, settings, point, existing)
    newer = passed_over(existing, begins.point if begins else None) if wish.checkpoint is None else []
    try:
        return preflight(job.id, spec, begins, newer, where)
    except NeedsModel as error:
        raise ApiError(409, f"{error}; it can be planned once it has a checkpoint.", code="plan_unknown") from error


async def _newest_readable(
    database: Database, settings: Settings, point: CheckpointRef, existing: list[CheckpointRef]
) -> tuple[Beginning, list[CheckpointRef]]:
    """Where ranks would begin, which pass over a manifest that is damaged or gone; and the list with these marked.

    Nothing is written. Raises ApiError 409 of the newest when none can be read, 503 when the store does not answer.
    """
    usable = [ref for ref in existing if ref.status in USABLE and ref.job_id == point.job_id]
    first: ApiError | None = None
    for ref in sorted(usable, key=lambda ref: (ref.attempt, ref.step), reverse=True) or [point]:
        try:
            return Beginning(ref, await _manifest(database, settings, ref)), existing
        except ApiError as error:
            if error.code != "checkpoint_unreadable":
                raise
            first = first or error
            damaged = replace(ref, status="corrupt", problem=str(error.__cause__))
            existing = [damaged if each.id == ref.id else each for each in existing]
    assert first is not None, "the point itself was tried"
    raise first


async def _manifest(database: Database, settings: Settings, point: CheckpointRef) -> Manifest:
    url = settings.job_store(point.job_id)
    with store_answers():
        whole = await whole_store(database, settings, open_store)
        return await asyncio.to_thread(lambda: checkpoint_files.read_manifest(open_store(url), point.folder, whole))


async def _submitted(response: Response, database: Database, submission: Submission) -> JobView:
    made = await idempotency.submit(database, submission)
    response.headers["Location"] = f"/v1/jobs/{made.job_id}"
    if not made.created:
        response.status_code = 200
    return with_etag(response, await answer(database, made.job_id))
