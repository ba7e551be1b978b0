"""Checkpoints as the API shows them: pages of a job's, and one whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from server.errors import invalid
from server.models import Checkpoint, CheckpointShard
from server.paging import read_cursor, write_cursor
from server.rows import needs
from server.rows.numbers import join
from server.views import CheckpointPage, CheckpointShardView, CheckpointView, NeededBy

ORDER = "-step,-attempt"  # both name a folder of a job, so no two are equal
LAST = 2**63  # steps and attempts are whole numbers below


@dataclass(frozen=True)
class CheckpointQuery:
    """What a list of checkpoints is asked for."""

    shards: bool = False  # each rank's file too, not only which are bad
    removed: bool = False  # those that retention took, too
    cursor: str | None = None
    limit: int = 50


async def page(connection: AsyncConnection, job_id: str, query: CheckpointQuery) -> CheckpointPage:
    """One page of a job's checkpoints, newest step first. Raises ApiError 422 for a cursor of another list."""
    statement = select(Checkpoint.__table__).where(Checkpoint.job_id == job_id)
    if not query.removed:
        statement = statement.where(Checkpoint.status != "deleted")
    if query.cursor is not None:
        statement = statement.where(tuple_(Checkpoint.step, Checkpoint.attempt) < _place(query.cursor))
    newest_first = statement.order_by(Checkpoint.step.desc(), Checkpoint.attempt.desc())
    rows = (await connection.execute(newest_first.limit(query.limit + 1))).all()
    shown = rows[: query.limit]
    cursor = write_cursor(ORDER, [shown[-1].step, shown[-1].attempt]) if len(rows) > query.limit else None
    counts = select(Checkpoint.status, func.count()).where(Checkpoint.job_id == job_id).group_by(Checkpoint.status)
    return CheckpointPage(
        items=await _views(connection, job_id, shown, shards=query.shards),
        next_cursor=cursor,
        counts={row[0]: row[1] for row in (await connection.execute(counts)).all()},
    )


async def one(connection: AsyncConnection, checkpoint_id: str) -> CheckpointView | None:
    """A checkpoint with each rank's file, or None."""
    row = (await connection.execute(select(Checkpoint.__table__).where(Checkpoint.id == checkpoint_id))).one_or_none()
    return None if row is None else (await _views(connection, row.job_id, [row], shards=True))[0]


def _place(cursor: str) -> tuple[int, int]:
    step, attempt = read_cursor(cursor, ORDER, 2)
    if not all(isinstance(part, int) and 0 <= part < LAST for part in (step, attempt)):
        raise invalid("cursor", "is not a cursor of this list; start again without it")
    return step, attempt


async def _views(
    connection: AsyncConnection, job_id: str, rows: Sequence[Row[Any]], *, shards: bool
) -> list[CheckpointView]:
    files = await _shards(connection, [row.id for row in rows], only_bad=not shards)
    needed = await needs.of_jobs(connection, [job_id]) if rows else []
    return [_view(row, files.get(row.id, []), needed, shards=shards) for row in rows]


async def _shards(
    connection: AsyncConnection, ids: Collection[str], *, only_bad: bool
) -> dict[str, list[CheckpointShardView]]:
    if not ids:
        return {}
    statement = (
        select(CheckpointShard.__table__)
        .where(CheckpointShard.checkpoint_id.in_(ids))
        .order_by(CheckpointShard.checkpoint_id, CheckpointShard.rank)
    )
    if only_bad:
        statement = statement.where(CheckpointShard.status != "ok")
    found: dict[str, list[CheckpointShardView]] = {}
    for row in (await connection.execute(statement)).all():
        fields = dict(row._mapping)
        found.setdefault(fields.pop("checkpoint_id"), []).append(CheckpointShardView.model_validate(fields))
    return found


def _view(
    row: Row[Any], files: Sequence[CheckpointShardView], needed: Sequence[needs.Need], *, shards: bool
) -> CheckpointView:
    fields = dict(row._mapping)
    fields["eval_loss"] = join(row.eval_loss, fields.pop("eval_loss_flag"))
    fields["seconds_by"] = row.seconds_by or {}
    by = [NeededBy(job_id=need.job_id, name=need.job_name) for need in needed if need.checkpoint_id == row.id]
    fields["bad_ranks"] = [file.rank for file in files if file.status != "ok"]
    return CheckpointView.model_validate({**fields, "needed_by": by, "shards": list(files) if shards else []})
