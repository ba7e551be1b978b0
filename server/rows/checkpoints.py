"""Checkpoints and their shards: what ranks published, verified marks, pins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Row, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.ids import new_id
from server.models import Attempt, Checkpoint, CheckpointShard, Job
from server.rows.numbers import split
from server.states import AttemptStatus
from workers.contract import CheckpointRecord

CheckpointStatus = Literal["complete", "verified", "corrupt", "deleted"]
USABLE: tuple[CheckpointStatus, ...] = ("complete", "verified")
REMOVING = "its files are being removed"  # `problem` of a row in status deleted until the files are gone


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint as retention and resume need it."""

    id: str
    job_id: str
    attempt: int
    step: int
    folder: str
    status: str
    pinned: bool
    eval_loss: float | None
    problem: str | None
    created_at: datetime
    verified_at: datetime | None


@dataclass(frozen=True)
class KnownJob:
    """What the database says of a job's store."""

    running_fence: int = 0  # number of the attempt that may still write; 0: none does
    folders: Mapping[str, str] = field(default_factory=dict)  # status of each checkpoint's row, by folder
    removing: Set[str] = frozenset()  # folders whose files the controller is about to remove


_REF = [getattr(Checkpoint, name) for name in CheckpointRef.__dataclass_fields__]


async def record(tx: Tx, job_id: str, attempt: int, report: CheckpointRecord) -> str | None:
    """Insert a published checkpoint with its shards; None when this folder is already known (a repeated message)."""
    eval_loss, flag = split(report.eval_loss)
    checkpoint_id = new_id()
    inserted = await tx.execute(
        tx.insert(Checkpoint)
        .values(
            id=checkpoint_id,
            job_id=job_id,
            attempt=attempt,
            step=report.step,
            folder=report.folder,
            status="complete",  # verified is what was read back
            ranks=report.ranks,
            stage=report.stage,
            bytes=sum(shard.bytes for shard in report.shards),
            digest=report.digest,
            eval_loss=eval_loss,
            eval_loss_flag=flag,
            seconds=report.seconds,
            seconds_by=report.seconds_by or None,
            created_at=report.at,
        )
        .on_conflict_do_nothing(index_elements=["job_id", "folder"])
        .returning(Checkpoint.id)
    )
    if inserted.one_or_none() is None:
        return None
    shards = [{"checkpoint_id": checkpoint_id, **shard.model_dump()} for shard in report.shards]
    if shards:
        await tx.execute(insert(CheckpointShard), shards)
    tx.changed("checkpoints", job_id)
    return checkpoint_id


async def of_job(connection: AsyncConnection, job_id: str) -> list[CheckpointRef]:
    """Checkpoints of a job that still exist, newest step first; of one step the newest attempt first."""
    return await of_jobs(connection, [job_id])


async def of_jobs(connection: AsyncConnection, job_ids: Collection[str]) -> list[CheckpointRef]:
    """Checkpoints of these jobs that still exist, newest step first; of one step the newest attempt first."""
    statement = (
        select(*_REF)
        .where(Checkpoint.job_id.in_(job_ids), Checkpoint.status != "deleted")
        .order_by(Checkpoint.step.desc(), Checkpoint.attempt.desc())
    )
    return [_ref(row) for row in (await connection.execute(statement)).all()]


async def newest_usable(connection: AsyncConnection, job_id: str) -> CheckpointRef | None:
    """What a resume starts from when nobody named a checkpoint: of the newest attempt that has one, the last step."""
    statement = (
        select(*_REF)
        .where(Checkpoint.job_id == job_id, Checkpoint.status.in_(USABLE))
        .order_by(Checkpoint.attempt.desc(), Checkpoint.step.desc())
        .limit(1)
    )
    row = (await connection.execute(statement)).one_or_none()
    return None if row is None else _ref(row)


async def resume_point(connection: AsyncConnection, job_id: str) -> CheckpointRef | None:
    """The checkpoint the next attempt starts from, or None for the beginning.

    The newest usable one; but one that a person named goes before it until something was written since that resume.
    A fork without any of its own starts from the checkpoint of the other job that it was forked from.
    """
    statement = select(Job.resume_checkpoint, Job.queued_at, Job.forked_from).where(Job.id == job_id)
    job = (await connection.execute(statement)).one_or_none()
    newest = await newest_usable(connection, job_id)
    if job is None:
        return newest
    is_newer = newest is not None and newest.created_at >= job.queued_at
    named = None if is_newer else await _usable(connection, job.resume_checkpoint)
    return named or newest or await _usable(connection, job.forked_from)


async def beginning(connection: AsyncConnection, job_id: str) -> CheckpointRef | None:
    """What a resume starts from when nobody names a checkpoint now, or None for step 0."""
    origin = (await connection.execute(select(Job.forked_from).where(Job.id == job_id))).scalar_one_or_none()
    return await newest_usable(connection, job_id) or await _usable(connection, origin)


async def _usable(connection: AsyncConnection, checkpoint_id: str | None) -> CheckpointRef | None:
    found = None if checkpoint_id is None else await find(connection, checkpoint_id)
    return found if found is not None and found.status in USABLE else None


async def known_folders(connection: AsyncConnection) -> dict[str, KnownJob]:
    """What the database says of every job's store."""
    statement = select(Checkpoint.job_id, Checkpoint.folder, Checkpoint.status, Checkpoint.problem)
    folders, removing = defaultdict[str, dict[str, str]](dict), defaultdict[str, set[str]](set)
    for row in (await connection.execute(statement)).all():
        folders[row.job_id][row.folder] = row.status
        if row.status == "deleted" and row.problem == REMOVING:
            removing[row.job_id].add(row.folder)
    living = select(Attempt.job_id, Attempt.number).where(Attempt.status != AttemptStatus.RELEASED)
    fences = {row.job_id: row.number for row in (await connection.execute(living)).all()}
    ids = (await connection.execute(select(Job.id))).scalars()
    return {job_id: KnownJob(fences.get(job_id, 0), folders[job_id], removing[job_id]) for job_id in ids}


async def any_exists(connection: AsyncConnection) -> bool:
    """Whether any job has a checkpoint that was not removed."""
    existing = select(Checkpoint.id).where(Checkpoint.status != "deleted").limit(1)
    return (await connection.execute(existing)).one_or_none() is not None


async def find(connection: AsyncConnection, checkpoint_id: str) -> CheckpointRef | None:
    """One checkpoint, or None."""
    row = (await connection.execute(select(*_REF).where(Checkpoint.id == checkpoint_id))).one_or_none()
    return None if row is None else _ref(row)


async def read_by(connection: AsyncConnection, job_id: str, attempt_id: str, folder: str) -> CheckpointRef | None:
    """The checkpoint in a folder of the store that an attempt begins from: its job's, or the one it was forked from."""
    begins = (
        select(Checkpoint.job_id)
        .join(Attempt, Attempt.resume_checkpoint == Checkpoint.id)
        .where(Attempt.id == attempt_id)
    )
    owner = (await connection.execute(begins)).scalar_one_or_none() or job_id
    return await in_folder(connection, owner, folder)


async def in_folder(connection: AsyncConnection, job_id: str, folder: str) -> CheckpointRef | None:
    """The checkpoint in a folder of a job's store that still exists, or None."""
    there = (Checkpoint.job_id == job_id) & (Checkpoint.folder == folder) & (Checkpoint.status != "deleted")
    row = (await connection.execute(select(*_REF).where(there))).one_or_none()
    return None if row is None else _ref(row)


async def set_status(tx: Tx, checkpoint_id: str, status: CheckpointStatus, *, problem: str | None = None) -> None:
    """Set what a checkpoint is, without having read it; see `readings.py` for what a reading found."""
    await tx.execute(update(Checkpoint).where(Checkpoint.id == checkpoint_id).values(status=status, problem=problem))
    found = await find(tx.connection, checkpoint_id)
    tx.changed("checkpoints", None if found is None else found.job_id)


async def mark_corrupt(tx: Tx, ref: CheckpointRef, problem: str) -> None:
    """A rank read it and found it wrong: from now on nothing begins from it, and a pin moves to what is left."""
    values = {"status": "corrupt", "problem": problem[:2000], "verified_at": None}
    await tx.execute(update(Checkpoint).where(Checkpoint.id == ref.id, Checkpoint.status != "deleted").values(**values))
    tx.changed("checkpoints", ref.job_id)
    if ref.pinned:
        await pin_newest(tx, ref.job_id)


async def pin_newest(tx: Tx, job_id: str) -> None:
    """Pin what the job would resume from, and nothing else of it."""
    await unpin(tx, job_id)
    needed = await resume_point(tx.connection, job_id)
    if needed is not None and needed.job_id == job_id:  # a fork's origin is held by the fork itself
        await tx.execute(update(Checkpoint).where(Checkpoint.id == needed.id).values(pinned=True))
        tx.changed("checkpoints", job_id)


async def unpin(tx: Tx, job_id: str) -> None:
    """Take every pin of a job away."""
    statement = update(Checkpoint).where(Checkpoint.job_id == job_id, Checkpoint.pinned).values(pinned=False)
    if (await tx.execute(statement)).rowcount:
        tx.changed("checkpoints", job_id)


async def unpin_many(tx: Tx, job_ids: Collection[str]) -> None:
    """Take every pin of these jobs away."""
    if job_ids:
        pinned = update(Checkpoint).where(Checkpoint.job_id.in_(job_ids), Checkpoint.pinned)
        await tx.execute(pinned.values(pinned=False))


def _ref(row: Row[Any]) -> CheckpointRef:
    return CheckpointRef(**row._mapping)
