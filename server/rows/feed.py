"""The feed: what changed, in commit order; written by `Tx.write_changes`, read here, pruned here."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.models import Change

KEPT = 20_000


@dataclass(frozen=True)
class FeedEntry:
    """One change."""

    id: int
    topic: str
    job_id: str | None


@dataclass(frozen=True)
class FeedSpan:
    """Ids of the oldest kept and the newest change; (0, 0) when there is none."""

    oldest: int
    newest: int


async def span(connection: AsyncConnection) -> FeedSpan:
    """What can be replayed."""
    row = (await connection.execute(select(func.min(Change.id), func.max(Change.id)))).one()
    return FeedSpan(row[0] or 0, row[1] or 0)


async def after(connection: AsyncConnection, last_id: int, limit: int = 1000) -> list[FeedEntry]:
    """Changes with a greater id than `last_id`, in order."""
    statement = (
        select(Change.id, Change.topic, Change.job_id).where(Change.id > last_id).order_by(Change.id).limit(limit)
    )
    return [FeedEntry(*row) for row in (await connection.execute(statement)).all()]


async def prune(tx: Tx) -> None:
    """Keep the newest KEPT changes."""
    newest = (await span(tx.connection)).newest
    await tx.execute(delete(Change).where(Change.id <= newest - KEPT))
