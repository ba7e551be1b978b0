"""Jobs as the API shows them: pages of the table, and one job whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any, Literal

from sqlalchemy import ColumnElement, Row, Select, and_, exists, func, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from server.models import Attempt, Job, JobTag
from server.paging import read_cursor, write_cursor
from server.rows import attempts
from server.rows.attempts import reason_view
from server.rows.new_jobs import fold
from server.rows.numbers import join
from server.states import LIVE, Action, Desired, Status, allowed_actions
from server.views import ErrorView, JobListItem, JobPage, JobView

Sort = Literal["created_at", "-created_at", "name", "-name", "status", "-status", "loss", "-loss", "step", "-step"]

_ID_PART = re.compile(r"[0-9a-f-]{4,36}\Z")
_SUMMARY_NAMES = [name for name in JobListItem.model_fields if name not in ("eta_seconds", "allowed_actions")]
_DETAIL_NAMES = (
    "spec", "spec_yaml", "chunk", "micro_batches", "tokens_per_second", "digest", "cloned_from", "forked_from",
    "fork_step", "error",
)  # fmt: skip
_LIST = [getattr(Job, name) for name in [*_SUMMARY_NAMES, "reason_data", "loss_flag", "step_seconds"]]
_DETAIL = [*_LIST, *(getattr(Job, name) for name in _DETAIL_NAMES)]


@dataclass(frozen=True)
class JobQuery:
    """What a list of jobs is asked for."""

    statuses: tuple[Status, ...] = ()  # empty: all
    search: str = ""  # part of a name in any script, or the beginning or end of an id
    tag: str | None = None
    owner: str | None = None
    sort: Sort = "-created_at"
    cursor: str | None = None
    limit: int = 50


async def page(connection: AsyncConnection, query: JobQuery) -> JobPage:
    """One page of jobs. Raises ApiError 422 for a cursor of another order.

    The ids of the page are found first, from indexes alone; only then whole rows are read, for these ids.
    """
    column, descending = _sort_column(query.sort)
    ids = _filtered(select(Job.id), connection, query)
    if query.statuses:
        ids = ids.where(Job.status.in_(query.statuses))
    if query.cursor is not None:
        ids = ids.where(_after(query, column, descending))
    value = column.desc() if descending else column.asc()
    order = [value.nulls_last() if column is Job.loss else value, Job.id.desc() if descending else Job.id.asc()]
    wanted = ids.order_by(*order).limit(query.limit + 1).subquery()
    rows = (await connection.execute(select(*_LIST).join(wanted, wanted.c.id == Job.id).order_by(*order))).all()
    shown = rows[: query.limit]
    cursor = write_cursor(query.sort, [_key(shown[-1], column), shown[-1].id]) if len(rows) > query.limit else None
    return JobPage(items=[_item(row) for row in shown], next_cursor=cursor, counts=await _counts(connection, query))


async def detail(connection: AsyncConnection, job_id: str, now: datetime) -> JobView | None:
    """One job with its newest attempt, or None."""
    row = (await connection.execute(select(*_DETAIL).where(Job.id == job_id))).one_or_none()
    if row is None:
        return None
    newest = await attempts.views(connection, job_id, now=now, number=row.attempt) if row.attempt else []
    return JobView(
        **_fields(row),
        spec=row.spec,
        spec_yaml=row.spec_yaml,
        chunk=row.chunk,
        micro_batches=row.micro_batches,
        tokens_per_second=row.tokens_per_second,
        digest=row.digest,
        cloned_from=row.cloned_from,
        forked_from=row.forked_from,
        fork_step=row.fork_step,
        error=None if row.error is None else ErrorView.model_validate(row.error),
        current_attempt=newest[0] if newest else None,
    )


async def ids_matching(connection: AsyncConnection, query: JobQuery) -> list[str]:
    """The ids of every job that the filter of a query means, oldest first."""
    statement = _filtered(select(Job.id), connection, query)
    if query.statuses:
        statement = statement.where(Job.status.in_(query.statuses))
    return list((await connection.execute(statement.order_by(Job.id))).scalars())


async def attempt_numbers(connection: AsyncConnection, job_id: str) -> dict[str, int]:
    """Number of each attempt of a job, by attempt id."""
    rows = (await connection.execute(select(Attempt.id, Attempt.number).where(Attempt.job_id == job_id))).all()
    return {row.id: row.number for row in rows}


def _filtered(
    statement: Select[*tuple[Any, ...]], connection: AsyncConnection, query: JobQuery
) -> Select[*tuple[Any, ...]]:
    if query.search:
        text = fold(query.search)
        find = func.instr if connection.dialect.name == "sqlite" else func.strpos
        matches = [find(Job.name_folded, text) > 0]
        if _ID_PART.match(text):
            matches += [Job.id.startswith(text), Job.id.endswith(text)]
        statement = statement.where(or_(*matches))
    if query.owner is not None:
        statement = statement.where(Job.owner == query.owner)
    if query.tag is not None:
        statement = statement.where(exists().where(JobTag.job_id == Job.id, JobTag.tag == query.tag))
    return statement


async def _counts(connection: AsyncConnection, query: JobQuery) -> dict[str, int]:
    statement = _filtered(select(Job.status, func.count()), connection, query).group_by(Job.status)
    return {row[0]: row[1] for row in (await connection.execute(statement)).all()}


def _sort_column(sort: Sort) -> tuple[Any, bool]:
    columns = {
        "created_at": Job.created_at,
        "name": Job.name_folded,
        "status": Job.status,
        "loss": Job.loss,
        "step": Job.step,
    }
    return columns[sort.lstrip("-")], sort.startswith("-")


def _key(row: Row[Any], column: Any) -> Any:
    if column is Job.name_folded:
        return fold(row.name)
    if column is Job.created_at:
        return row.created_at.isoformat()
    return getattr(row, column.key)


def _after(query: JobQuery, column: Any, descending: bool) -> ColumnElement[bool]:
    """Rows behind the cursor; an absent loss stands last in both directions."""
    assert query.cursor is not None
    value, job_id = read_cursor(query.cursor, query.sort, 2)
    if column is Job.created_at:
        value = _time(value)
    by_id = Job.id < str(job_id) if descending else Job.id > str(job_id)
    if value is None:
        return and_(column.is_(None), by_id)
    pair, key = tuple_(column, Job.id), (value, str(job_id))
    behind: ColumnElement[bool] = pair < key if descending else pair > key
    return or_(behind, column.is_(None)) if column is Job.loss else behind


def _time(text: Any) -> datetime:
    try:
        return datetime.fromisoformat(str(text)).astimezone(UTC)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)


def _item(row: Row[Any]) -> JobListItem:
    return JobListItem.model_construct(**_fields(row))


def _fields(row: Row[Any]) -> dict[str, Any]:
    status, desired = Status(row.status), Desired(row.desired)
    kept = {name: row._mapping[name] for name in _SUMMARY_NAMES}
    return {
        **kept,
        "status": status,
        "desired": desired,
        "reason": reason_view(row.reason, row.reason_data),
        "loss": join(row.loss, row.loss_flag),
        "eta_seconds": _eta_seconds(row) if status in LIVE else None,
        "allowed_actions": _allowed(status, desired),
    }


@cache
def _allowed(status: Status, desired: Desired) -> list[Action]:
    return list(allowed_actions(status, desired))


def _eta_seconds(row: Row[Any]) -> float | None:
    if row.step_seconds is None or row.step == 0:
        return None
    return float(max(0, row.steps - row.step) * row.step_seconds)
