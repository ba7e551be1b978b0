"""Numbers about the whole service, for probes and Prometheus."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from server.models import Attempt, Checkpoint, Job, SeriesStats
from server.rows import leases, nodes
from server.states import AttemptStatus

LEADER = "controller"  # name of the lease


async def jobs_by_status(connection: AsyncConnection) -> dict[str, int]:
    """How many jobs are in each status that has any."""
    rows = (await connection.execute(select(Job.status, func.count()).group_by(Job.status))).all()
    return {row[0]: row[1] for row in rows}


async def numbers(connection: AsyncConnection) -> dict[str, tuple[str, float]]:
    """Name -> (help text, value)."""
    slots = await nodes.slot_totals(connection)
    living = (AttemptStatus.STARTING, AttemptStatus.RUNNING, AttemptStatus.STOPPING)
    ranks = await connection.scalar(select(func.sum(Attempt.ranks)).where(Attempt.status.in_(living)))
    stored = select(func.count(), func.sum(Checkpoint.bytes)).where(Checkpoint.status != "deleted")
    kept = (await connection.execute(stored)).one()
    points = await connection.scalar(select(func.sum(SeriesStats.count)))
    return {
        "slots": ("Slots of all living nodes.", slots.total),
        "slots_free": ("Slots that nobody holds.", slots.free),
        "ranks": ("Ranks of attempts that are not released.", float(ranks or 0)),
        "checkpoints": ("Checkpoints in the store.", kept[0]),
        "checkpoint_bytes": ("Bytes of checkpoints in the store.", float(kept[1] or 0)),
        "points": ("Metric points stored.", float(points or 0)),
    }


async def leader(connection: AsyncConnection, now: datetime) -> str:
    """Whether a controller leads."""
    lease = await leases.read(connection, LEADER)
    if lease is None:
        return "none yet"
    return "ok" if lease.expires_at > now else f"none since {lease.expires_at.isoformat()}"
