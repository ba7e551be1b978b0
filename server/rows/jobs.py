"""Jobs: the guarded transition, and what the controller and the API read of a job.

Note: why a transition is a guarded update. Two parties may want to move a job at the same time. The one whose
`UPDATE jobs ... WHERE id = ? AND status IN (allowed)` finds no row has lost: it reads again and decides again. The
event of a transition is written in the same transaction, so that a job's history has neither gaps nor inventions.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.job_card import JobCard, Origin
from server.models import Job, JobTag
from server.reasons import sentence
from server.rows import checkpoints, events
from server.states import CAUSES, ENDED, PREVIOUS, Desired, Status
from workers.spec import JobSpec

Data = Mapping[str, Any]


@dataclass(frozen=True)
class JobRecord:
    """A job as the controller and the actions need it."""

    id: str
    name: str
    owner: str
    spec: Mapping[str, Any]  # as it runs now; `job_spec()` validates it
    chunk: int
    micro_batches: int
    ranks: int
    stage: int | None  # None: auto, not yet decided
    steps: int
    priority: int
    status: Status
    desired: Desired
    reason: str | None
    reason_data: Mapping[str, Any] | None
    version: int
    created_at: datetime
    queued_at: datetime
    not_before: datetime | None
    desired_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    attempt: int  # number of the newest attempt, 0 before the first
    user_failures: int
    infrastructure_failures: int
    progress_step: int
    resume_checkpoint: str | None
    forked_from: str | None  # checkpoint of another job, where this one begins
    step: int
    last_report_at: datetime | None

    def job_spec(self) -> JobSpec:
        """The spec, validated."""
        return JobSpec.model_validate(self.spec)


_COLUMNS = [getattr(Job, name) for name in JobRecord.__dataclass_fields__]


@dataclass(frozen=True)
class Fork:
    """Where a job begins that does not begin at step 0."""

    checkpoint_id: str
    step: int


@dataclass(frozen=True)
class NewJob:
    """What a submitted spec becomes."""

    id: str
    owner: str
    spec: JobSpec
    spec_yaml: str  # as submitted
    stage: int | None
    plan: Mapping[str, Any] | None  # PlanView
    cloned_from: str | None = None
    fork: Fork | None = None


def fold(name: str) -> str:
    """`name` for search and sort: NFKC and case folded."""
    return unicodedata.normalize("NFKC", name).casefold()


async def create(tx: Tx, new: NewJob) -> None:
    """Insert a queued job with its event."""
    spec = new.spec
    start = {"step": new.fork.step if new.fork else 0, "created_at": tx.now}
    waiting = {"status": Status.QUEUED, "desired": Desired.RUN, "reason": "submitted"}
    await tx.execute(insert(Job).values(**_columns(new), **waiting, **start, updated_at=tx.now, queued_at=tx.now))
    await set_tags(tx, new.id, spec.tags)
    await events.append(
        tx,
        new.id,
        "job.submitted",
        f"Submitted by {new.owner}." if new.fork is None else f"Forked at step {new.fork.step} by {new.owner}.",
        actor=f"user:{new.owner}",
        cause="submitted",
        new=Status.QUEUED,
        data=_origin(new),
    )
    tx.changed("job", new.id)
    tx.changed("queue")
    tx.work()


async def recreate(tx: Tx, new: NewJob, chunk: int, created_at: datetime, attempt: int, step: int) -> bool:
    """Insert a job that the store knows, at rest; `attempt` is the number of its last one. False: it is there."""
    columns = {**_columns(new), "chunk": chunk, "attempt": attempt, "step": step, "created_at": created_at}
    resting = {"status": Status.CANCELLED, "desired": Desired.RUN, "reason": "recovered", "reason_data": {"step": step}}
    times = {"updated_at": tx.now, "queued_at": tx.now, "ended_at": tx.now}
    statement = tx.insert(Job).values(**columns, **resting, **times).on_conflict_do_nothing(index_elements=["id"])
    if (await tx.execute(statement.returning(Job.id))).one_or_none() is None:
        return False
    await set_tags(tx, new.id, new.spec.tags)
    tx.changed("job", new.id)
    return True


def _columns(new: NewJob) -> dict[str, Any]:
    """What a spec says about a job."""
    spec = new.spec
    return {
        "id": new.id,
        "name": spec.name,
        "name_folded": fold(spec.name),
        "tags": spec.tags,
        "owner": new.owner,
        "spec": spec.model_dump(mode="json"),
        "spec_yaml": new.spec_yaml,
        "model_kind": spec.model.kind,
        "chunk": spec.chunk,
        "micro_batches": spec.train.micro_batches,
        "ranks": spec.resources.ranks,
        "stage": new.stage,
        "steps": spec.train.steps,
        "priority": spec.priority,
        "plan": None if new.plan is None else dict(new.plan),
        "cloned_from": new.cloned_from,
        "forked_from": new.fork.checkpoint_id if new.fork else None,
        "fork_step": new.fork.step if new.fork else None,
    }


def _origin(new: NewJob) -> Data:
    fork = {"checkpoint": new.fork.checkpoint_id, "step": new.fork.step} if new.fork else {}
    return {**({"job": new.cloned_from} if new.cloned_from else {}), **fork}


async def set_tags(tx: Tx, job_id: str, tags: Collection[str]) -> None:
    """Replace the tags that filters see."""
    await tx.execute(delete(JobTag).where(JobTag.job_id == job_id))
    if tags:
        await tx.execute(insert(JobTag), [{"job_id": job_id, "tag": tag} for tag in dict.fromkeys(tags)])


async def get(connection: AsyncConnection, job_id: str) -> JobRecord | None:
    """One job, or None."""
    row = (await connection.execute(select(*_COLUMNS).where(Job.id == job_id))).one_or_none()
    return None if row is None else _record(row)


async def existing(connection: AsyncConnection, job_ids: Collection[str]) -> set[str]:
    """Those of `job_ids` that there are."""
    return set((await connection.execute(select(Job.id).where(Job.id.in_(job_ids)))).scalars())


async def any_exists(connection: AsyncConnection) -> bool:
    """Whether there is any job."""
    return (await connection.execute(select(Job.id).limit(1))).one_or_none() is not None


async def card(connection: AsyncConnection, job_id: str) -> JobCard | None:
    """What the job's store is told of it, or None when it is gone."""
    names = ("id", "owner", "created_at", "spec", "spec_yaml", "chunk", "cloned_from", "forked_from", "fork_step")
    statement = select(*(getattr(Job, name) for name in names)).where(Job.id == job_id)
    row = (await connection.execute(statement)).one_or_none()
    if row is None:
        return None
    begins = None if row.forked_from is None else await checkpoints.find(connection, row.forked_from)
    origin = None if begins is None else Origin(job=begins.job_id, folder=begins.folder)
    return JobCard(**row._mapping, origin=origin)


async def submitted_text(connection: AsyncConnection, job_id: str) -> str | None:
    """The spec as its owner wrote it, or None when there is no such job."""
    return (await connection.execute(select(Job.spec_yaml).where(Job.id == job_id))).scalar_one_or_none()


async def lock(tx: Tx, job_id: str) -> JobRecord | None:
    """One job, kept from changing until the transaction ends; or None."""
    statement = select(*_COLUMNS).where(Job.id == job_id).with_for_update()
    row = (await tx.execute(statement)).one_or_none()
    return None if row is None else _record(row)


async def owned(connection: AsyncConnection, job_ids: Collection[str], owner: str) -> set[str]:
    """Those of `job_ids` that belong to `owner`."""
    statement = select(Job.id).where(Job.id.in_(job_ids), Job.owner == owner)
    return set((await connection.execute(statement)).scalars())


async def in_status(connection: AsyncConnection, statuses: Collection[Status]) -> list[JobRecord]:
    """All jobs in one of `statuses`, in the order of the queue: priority (higher first), then time, then id."""
    statement = select(*_COLUMNS).where(Job.status.in_(statuses)).order_by(Job.priority.desc(), Job.queued_at, Job.id)
    return [_record(row) for row in (await connection.execute(statement)).all()]


async def transition(
    tx: Tx,
    job_id: str,
    new: Status,
    *,
    actor: str,
    reason: str,
    data: Mapping[str, Any] | None = None,
    allowed: Collection[Status] | None = None,
    attempt: int | None = None,
    desired: Desired | None = None,
    cause: str | None = None,
    values: Mapping[str, Any] | None = None,
) -> Status | None:
    """Move a job to `new` when its status is in `allowed` (default: every legal one); returns the old status.

    None means that nothing was written: the job is gone, somebody else moved it, or `attempt` (the fence) is no longer
    the newest one. `values` are further columns of `jobs` to set. The event is written in the same transaction.
    """
    job = await lock(tx, job_id)
    legal = PREVIOUS[new] if allowed is None else PREVIOUS[new] & frozenset(allowed)
    if job is None or job.status not in legal or (attempt is not None and job.attempt != attempt):
        return None
    changes = {**_times(job, new, tx.now), **(values or {})}
    if desired is not None:
        changes["desired"] = desired
        changes["desired_at"] = None if desired is Desired.RUN else tx.now
    statement = (
        update(Job)
        .where(Job.id == job_id, Job.status.in_(legal))
        .values(
            status=new,
            reason=reason,
            reason_data=None if data is None else dict(data),
            version=Job.version + 1,
            updated_at=tx.now,
            **changes,
        )
    )
    if (await tx.execute(statement)).rowcount != 1:
        return None
    await _after(tx, job, new)
    await events.append(
        tx,
        job_id,
        f"job.{new}",
        sentence(reason, data),
        actor=actor,
        cause=cause or CAUSES[(job.status, new)],
        old=job.status,
        new=new,
        attempt=job.attempt or None,
        data={"reason": reason, **(data or {})},
    )
    return job.status


async def transition_many(
    tx: Tx, job_ids: Collection[str], old: Status, new: Status, *, actor: str, reason: str, desired: Desired, data: Data
) -> set[str]:
    """Move all of `job_ids` that are in `old` to `new`, an ended status, with one statement; returns which moved."""
    assert new in ENDED and old in PREVIOUS[new], f"no edge for many jobs from {old} to {new}"
    statement = (
        update(Job)
        .where(Job.id.in_(job_ids), Job.status == old)
        .values(
            status=new,
            desired=desired,
            desired_at=tx.now,
            reason=reason,
            reason_data=dict(data),
            ended_at=tx.now,
            updated_at=tx.now,
            phase=None,
            version=Job.version + 1,
        )
        .returning(Job.id, Job.attempt)
    )
    moved = (await tx.execute(statement)).all()
    await events.append_many(
        tx,
        [(row.id, row.attempt or None) for row in moved],
        f"job.{new}",
        sentence(reason, data),
        actor=actor,
        cause=CAUSES[(old, new)],
        old=old,
        new=new,
        data={"reason": reason, **data},
    )
    await checkpoints.unpin_many(tx, [row.id for row in moved])
    for row in moved:
        tx.changed("job", row.id)
    if moved:
        tx.changed("queue")
        tx.work()
    return {row.id for row in moved}


def _times(job: JobRecord, new: Status, now: datetime) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if new is Status.STARTING and job.started_at is None:
        changes["started_at"] = now
    if new in ENDED:
        changes["ended_at"] = now
    if new is Status.QUEUED:
        changes |= {"ended_at": None, "error": None, "phase": None}
        if job.status not in (Status.STARTING, Status.RUNNING, Status.STOPPING):
            changes["queued_at"] = now  # a retry and a preempted job keep their place
    if new in ENDED or new is Status.PAUSED:
        changes["phase"] = None
    return changes


async def _after(tx: Tx, job: JobRecord, new: Status) -> None:
    if new is Status.PAUSED:
        await checkpoints.pin_newest(tx, job.id)
    elif new in (Status.RUNNING, Status.CANCELLED):
        await checkpoints.unpin(tx, job.id)
    tx.work()
    tx.changed("job", job.id)
    if Status.QUEUED in (new, job.status):
        tx.changed("queue")


async def set_values(tx: Tx, job_id: str, **values: Any) -> None:
    """Set columns of a job that are not its status; the version grows."""
    assert "status" not in values, "status moves by transition() only"
    await tx.execute(update(Job).where(Job.id == job_id).values(**values, version=Job.version + 1, updated_at=tx.now))
    tx.changed("job", job_id)


async def set_waiting_reason(tx: Tx, job_id: str, reason: str, data: Mapping[str, Any] | None = None) -> bool:
    """Why a queued job still waits. Writes (and tells the feed) only when it changed; True if it did."""
    job = await lock(tx, job_id)
    if job is None or job.status is not Status.QUEUED:
        return False
    if job.reason == reason and dict(job.reason_data or {}) == dict(data or {}):
        return False
    await tx.execute(
        update(Job)
        .where(Job.id == job_id, Job.status == Status.QUEUED)
        .values(reason=reason, reason_data=None if data is None else dict(data), updated_at=tx.now)
    )
    tx.changed("job", job_id)
    tx.changed("queue")
    return True


async def remove(tx: Tx, job_id: str) -> bool:
    """Delete a job in `deleting` with all that hangs on it. False if it is in another status or gone."""
    statement = delete(Job).where(Job.id == job_id, Job.status == Status.DELETING)
    removed = (await tx.execute(statement)).rowcount == 1
    if removed:
        tx.changed("job", job_id)
    return removed


def _record(row: Row[Any]) -> JobRecord:
    fields = dict(row._mapping)
    return JobRecord(**{**fields, "status": Status(fields["status"]), "desired": Desired(fields["desired"])})
