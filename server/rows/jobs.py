"""Jobs: the guarded transition, and what the controller and the API read of a job.

Note: why a transition is a guarded update. Two parties may want to move a job at the same time. The one whose
`UPDATE jobs ... WHERE id = ? AND status IN (allowed)` finds no row has lost: it reads again and decides again. The
event of a transition is written in the same transaction, so that a job's history has neither gaps nor inventions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.models import Job
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


async def get(connection: AsyncConnection, job_id: str) -> JobRecord | None:
    """One job, or None."""
    row = (await connection.execute(select(*_COLUMNS).where(Job.id == job_id))).one_or_none()
    return None if row is None else _record(row)


async def specs(connection: AsyncConnection, job_ids: Collection[str]) -> dict[str, Data]:
    """The specs of those of `job_ids` that there are, as they run now."""
    return {row.id: row.spec for row in await connection.execute(select(Job.id, Job.spec).where(Job.id.in_(job_ids)))}


async def existing(connection: AsyncConnection, job_ids: Collection[str]) -> set[str]:
    """Those of `job_ids` that there are."""
    return set((await connection.execute(select(Job.id).where(Job.id.in_(job_ids)))).scalars())


async def any_exists(connection: AsyncConnection) -> bool:
    """Whether there is any job."""
    return (await connection.execute(select(Job.id).limit(1))).one_or_none() is not None


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
