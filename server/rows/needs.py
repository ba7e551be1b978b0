"""Which checkpoints something refers to now: retention and deletion leave them alone, the page says who needs them.

A checkpoint is needed by a living attempt that began from it, by a job that is not at its end and names it, and by a
fork until the fork has two usable checkpoints of its own: before that, a damaged first save leads back to the origin.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import CompoundSelect, func, select, union
from sqlalchemy.ext.asyncio import AsyncConnection

from server.models import Attempt, Checkpoint, Job
from server.states import ACTIVE, AttemptStatus, Status

USABLE = ("complete", "verified")
OWN_ENOUGH = 2  # usable checkpoints of its own, after which a fork does not need its origin any more
UNENDED = (ACTIVE | {Status.PAUSED}) - {Status.DELETING}


@dataclass(frozen=True)
class Need:
    """A job needs a checkpoint."""

    checkpoint_id: str
    job_id: str  # who needs it
    job_name: str


async def of_jobs(connection: AsyncConnection, job_ids: Collection[str]) -> list[Need]:
    """Who needs which checkpoint of these jobs, the jobs themselves included."""
    theirs = Checkpoint.job_id.in_(job_ids)
    reading = (
        select(Checkpoint.id, Job.id, Job.name)
        .join(Attempt, Attempt.resume_checkpoint == Checkpoint.id)
        .join(Job, Job.id == Attempt.job_id)
        .where(theirs, Attempt.status != AttemptStatus.RELEASED)
    )
    named = (
        select(Checkpoint.id, Job.id, Job.name)
        .join(Job, Job.resume_checkpoint == Checkpoint.id)
        .where(theirs, Job.status.in_(UNENDED))
    )
    own = select(func.count()).where(Checkpoint.job_id == Job.id, Checkpoint.status.in_(USABLE))
    origin = select(Checkpoint.id).where(theirs)
    forked = select(Job.forked_from, Job.id, Job.name).where(
        Job.forked_from.in_(origin), Job.status.in_(UNENDED), own.correlate(Job).scalar_subquery() < OWN_ENOUGH
    )
    every: CompoundSelect[*tuple[Any, ...]] = union(reading, named, forked)
    return [Need(*row) for row in (await connection.execute(every)).all()]


async def by_others(connection: AsyncConnection, job_id: str) -> list[Need]:
    """Which other jobs need a checkpoint of this one: it cannot be deleted."""
    return [need for need in await of_jobs(connection, [job_id]) if need.job_id != job_id]
