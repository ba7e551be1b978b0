"""What reading checkpoints back found: which are due, how far a reading has come, and the mark it leaves.

A reading goes shard by shard, and each shard's time is written when it was read, so that a server killed in between
goes on behind it. A mark never brings back a checkpoint that retention has taken meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.models import Checkpoint, CheckpointShard, Job
from server.rows import checkpoints, events
from server.rows.checkpoints import USABLE, CheckpointRef
from server.states import Status

ShardStatus = Literal["ok", "missing", "corrupt"]
GONE = "its files are gone from the store; if they come back, verify it"
GOING = (Status.DELETING, Status.DELETE_FAILED)


@dataclass(frozen=True)
class Reading:
    """What a whole reading found."""

    problems: tuple[str, ...]  # empty: every byte is as it was written
    bad_ranks: frozenset[int] = frozenset()
    bytes_read: int | None = None  # None: by several readings


async def next_due(connection: AsyncConnection, again_before: datetime) -> CheckpointRef | None:
    """What to read next: what was never read, newest first; then what was read before `again_before`, oldest first."""
    statement = (
        select(Checkpoint.id)
        .join(Job, Job.id == Checkpoint.job_id)
        .where(Checkpoint.status.in_(USABLE), Job.status.not_in(GOING))
        .where(or_(Checkpoint.verified_at.is_(None), Checkpoint.verified_at < again_before))
        .order_by(Checkpoint.verified_at.is_not(None), Checkpoint.verified_at, Checkpoint.created_at.desc())
        .limit(1)
    )
    found = (await connection.execute(statement)).scalar_one_or_none()
    return None if found is None else await checkpoints.find(connection, found)


async def read_already(connection: AsyncConnection, ref: CheckpointRef) -> frozenset[int]:
    """Ranks whose shard was read since the last whole reading."""
    shard = CheckpointShard
    statement = select(shard.rank).where(shard.checkpoint_id == ref.id, shard.verified_at.is_not(None))
    if ref.verified_at is not None:
        statement = statement.where(shard.verified_at > ref.verified_at)
    return frozenset((await connection.execute(statement)).scalars())


async def note_shard(tx: Tx, ref: CheckpointRef, rank: int, status: ShardStatus) -> None:
    """A shard was read."""
    values = {"status": status, "verified_at": tx.now}
    of_rank = (CheckpointShard.checkpoint_id == ref.id, CheckpointShard.rank == rank)
    await tx.execute(update(CheckpointShard).where(*of_rank).values(**values))


async def bad_ranks(connection: AsyncConnection, checkpoint_id: str) -> frozenset[int]:
    """Ranks whose shard is marked as bad."""
    bad = CheckpointShard.status != "ok"
    statement = select(CheckpointShard.rank).where(CheckpointShard.checkpoint_id == checkpoint_id, bad)
    return frozenset((await connection.execute(statement)).scalars())


async def conclude(tx: Tx, checkpoint_id: str, reading: Reading, *, actor: str) -> bool:
    """Mark a checkpoint by what was found, with an event. False: retention has taken it meanwhile."""
    ok = not reading.problems
    marked = update(Checkpoint).where(Checkpoint.id == checkpoint_id, Checkpoint.status != "deleted")
    values = {
        "status": "verified" if ok else "corrupt",
        "problem": "; ".join(reading.problems)[:2000] or None,
        "verified_at": tx.now if ok else None,
    }
    if (await tx.execute(marked.values(**values))).rowcount != 1:
        return False
    await _mark_shards(tx, checkpoint_id, reading)
    ref = await checkpoints.find(tx.connection, checkpoint_id)
    assert ref is not None, checkpoint_id
    size = "all its" if reading.bytes_read is None else f"{reading.bytes_read:,}"
    said = f"{size} bytes are as they were written." if ok else "; ".join(reading.problems)[:500]
    await events.append(
        tx,
        ref.job_id,
        "checkpoint.verified" if ok else "checkpoint.corrupt",
        f"Checkpoint of step {ref.step}: {said}",
        actor=actor,
        attempt=ref.attempt,
        data={"step": ref.step, "folder": ref.folder},
    )
    tx.changed("checkpoints", ref.job_id)
    if not ok and ref.pinned:
        await checkpoints.pin_newest(tx, ref.job_id)  # what it resumes from now is another
    return True


async def mark_gone(tx: Tx, checkpoint_id: str, *, actor: str) -> None:
    """Its files are not in the store any more."""
    await conclude(tx, checkpoint_id, Reading((GONE,)), actor=actor)


async def _mark_shards(tx: Tx, checkpoint_id: str, reading: Reading) -> None:
    of_checkpoint = CheckpointShard.checkpoint_id == checkpoint_id
    status: ShardStatus = "missing" if reading.problems == (GONE,) else "ok"
    await tx.execute(update(CheckpointShard).where(of_checkpoint).values(status=status, verified_at=tx.now))
    if reading.bad_ranks:
        marked = update(CheckpointShard).where(of_checkpoint, CheckpointShard.rank.in_(list(reading.bad_ranks)))
        await tx.execute(marked.values(status="corrupt"))
