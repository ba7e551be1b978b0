"""Events: what happened to a job, in the order in which it was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.models import Event
from server.views import EventView


async def append(
    tx: Tx,
    job_id: str | None,
    action: str,
    message: str,
    *,
    actor: str,
    cause: str | None = None,
    old: str | None = None,
    new: str | None = None,
    attempt: int | None = None,
    rank: int | None = None,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Write one event. `actor` is `user:NAME`, `controller` or `rank:R`; `action` is dotted, as in `job.running`."""
    await tx.execute(
        insert(Event).values(
            job_id=job_id,
            attempt=attempt,
            rank=rank,
            at=tx.now,
            action=action,
            actor=actor,
            cause=cause,
            old=old,
            new=new,
            message=message,
            data=dict(data or {}),
        )
    )
    tx.changed("events", job_id)


async def append_many(
    tx: Tx,
    jobs: Sequence[tuple[str, int | None]],
    action: str,
    message: str,
    *,
    actor: str,
    cause: str,
    old: str,
    new: str,
    data: Mapping[str, Any],
) -> None:
    """Write the same event for many (job id, attempt)."""
    if not jobs:
        return
    same = {"at": tx.now, "action": action, "actor": actor, "cause": cause, "old": old, "new": new, "data": dict(data)}
    rows = [{"job_id": job_id, "attempt": attempt, "message": message, **same} for job_id, attempt in jobs]
    await tx.execute(insert(Event), rows)
    for job_id, _ in jobs:
        tx.changed("events", job_id)


async def page(
    connection: AsyncConnection, job_id: str, *, before: int | None, after: int | None, limit: int
) -> tuple[list[EventView], int | None]:
    """Events newest first before id `before`, or oldest first after id `after`; and the cursor of the next page."""
    statement = select(Event.__table__).where(Event.job_id == job_id).limit(limit + 1)
    if after is not None:
        statement = statement.where(Event.id > after).order_by(Event.id)
    else:
        statement = statement.order_by(Event.id.desc())
        if before is not None:
            statement = statement.where(Event.id < before)
    rows = (await connection.execute(statement)).all()
    more = len(rows) > limit
    return [_view(row) for row in rows[:limit]], (rows[limit - 1].id if more else None)


def _view(row: Row[Any]) -> EventView:
    return EventView.model_validate(dict(row._mapping))
