"""How a job comes to be: submitted, cloned, forked, or found again in the store; and the card that the store keeps."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.job_card import JobCard, Origin
from server.models import Job, JobTag
from server.rows import checkpoints, events, plans
from server.states import Desired, Status
from workers.spec import JobSpec


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


async def create(tx: Tx, new: NewJob) -> None:
    """Insert a queued job with its event; a plan that takes time is asked for."""
    spec = new.spec
    start = {"step": new.fork.step if new.fork else 0, "created_at": tx.now}
    waiting = {"status": Status.QUEUED, "desired": Desired.RUN, "reason": "submitted"}
    await tx.execute(insert(Job).values(**_columns(new), **waiting, **start, updated_at=tx.now, queued_at=tx.now))
    await set_tags(tx, new.id, spec.tags)
    if new.plan is None:
        await plans.request(tx, new.owner, spec.model_dump(mode="json"), new.id)
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


def _origin(new: NewJob) -> dict[str, Any]:
    fork = {"checkpoint": new.fork.checkpoint_id, "step": new.fork.step} if new.fork else {}
    return {**({"job": new.cloned_from} if new.cloned_from else {}), **fork}


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


def fold(name: str) -> str:
    """`name` for search and sort: NFKC and case folded."""
    return unicodedata.normalize("NFKC", name).casefold()


async def set_tags(tx: Tx, job_id: str, tags: Collection[str]) -> None:
    """Replace the tags that filters see."""
    await tx.execute(delete(JobTag).where(JobTag.job_id == job_id))
    if tags:
        await tx.execute(insert(JobTag), [{"job_id": job_id, "tag": tag} for tag in dict.fromkeys(tags)])
