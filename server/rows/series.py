"""Series: the named lines of an attempt, and what is known of each without reading a point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy import bindparam, exists, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.models import Series, SeriesStats
from server.points import CHUNK_POINTS, Points
from server.rows import chunks
from server.rows.numbers import join, split
from server.views import SeriesStatsView
from workers.contract import PointsRecord

_UNITS = {
    "lr": "1",
    "seconds": "s",
    "tokens_per_second": "1/s",
    "bytes_sent": "B",
    "tokens": "1",
}


@dataclass(frozen=True)
class Owner:
    """Whose points these are."""

    job_id: str
    attempt_id: str
    attempt: int
    rank: int


@dataclass(frozen=True)
class _Stored:
    """A series and its stats before a batch."""

    id: int
    name: str
    num_chunks: int
    tail_count: int
    count: int
    non_finite: int
    out_of_order: int
    first_step: int | None
    last_step: int | None
    last: float | None
    last_flag: int
    min: float | None
    max: float | None


_NUMBERS = ("count", "non_finite", "out_of_order", "first_step", "last_step", "last", "last_flag", "min", "max")
_KEPT = ("num_chunks", "tail_count", *_NUMBERS)
_UPDATE = (
    update(SeriesStats)
    .where(SeriesStats.series_id == bindparam("key"))
    .values(**{name: bindparam(f"new_{name}") for name in _KEPT})
)
_SELECT = (
    select(Series.id, Series.name, *(getattr(SeriesStats, name).label(name) for name in _KEPT))
    .join(SeriesStats, SeriesStats.series_id == Series.id)
    .where(Series.attempt_id == bindparam("of_attempt"), Series.rank == bindparam("of_rank"))
)


@dataclass(frozen=True)
class SeriesRef:
    """A stored series."""

    id: int
    attempt: int
    rank: int
    name: str


def unit_of(name: str) -> str | None:
    """The unit of the values of a series, by its name; None where they have none."""
    return _UNITS.get(name.partition("/")[0])


async def append(tx: Tx, owner: Owner, records: Sequence[PointsRecord]) -> None:
    """Store the points of a batch; of one step of a series the last value counts."""
    columns: dict[str, dict[int, tuple[int, float]]] = {}
    for record in records:
        at_us = microseconds(record.at)
        for name, value in record.values.items():
            columns.setdefault(name, {})[record.step] = (at_us, value)
    if not columns:
        return
    known = await _stored(tx, owner, columns)
    batches = [(known[name], _points(column)) for name, column in columns.items()]
    numbers = [await _new_numbers(tx, stored, points) for stored, points in batches]
    await chunks.put_tail(tx, [(stored.id, points) for stored, points in batches])
    updates = []
    for (stored, points), new in zip(batches, numbers, strict=True):
        tail = chunks.TailState(stored.num_chunks, stored.tail_count + len(points))
        if tail.count >= CHUNK_POINTS:
            tail = await chunks.seal(tx, stored.id, stored.num_chunks)
        updates.append({"key": stored.id, "new_num_chunks": tail.num_chunks, "new_tail_count": tail.count, **new})
    await tx.execute(_UPDATE, updates)
    tx.changed("metrics", owner.job_id)


def _points(column: Mapping[int, tuple[int, float]]) -> Points:
    steps = sorted(column)
    return Points(
        np.array(steps, np.int64),
        np.array([column[step][0] for step in steps], np.int64),
        np.array([column[step][1] for step in steps], np.float64),
    )


def microseconds(at: datetime) -> int:
    """A time as microseconds since 1970."""
    return round(at.timestamp() * 1e6)


async def _stored(tx: Tx, owner: Owner, names: Iterable[str]) -> dict[str, _Stored]:
    """The series of an attempt and rank, the named ones made where they do not exist."""
    known = await _select(tx, owner)
    missing = [name for name in names if name not in known]
    if not missing:
        return known
    place = {"job_id": owner.job_id, "attempt_id": owner.attempt_id, "attempt": owner.attempt, "rank": owner.rank}
    await tx.execute(insert(Series), [{**place, "name": name} for name in missing])
    made = (Series.attempt_id == owner.attempt_id) & (Series.rank == owner.rank)
    without_stats = select(Series.id).where(made, ~exists().where(SeriesStats.series_id == Series.id))
    ids = (await tx.execute(without_stats)).scalars().all()
    await tx.execute(insert(SeriesStats), [{"series_id": series_id} for series_id in ids])
    return await _select(tx, owner)


async def _select(tx: Tx, owner: Owner) -> dict[str, _Stored]:
    rows = (await tx.execute(_SELECT, {"of_attempt": owner.attempt_id, "of_rank": owner.rank})).all()
    return {row.name: _Stored(**row._mapping) for row in rows}


async def _new_numbers(tx: Tx, stored: _Stored, points: Points) -> dict[str, Any]:
    """The numbers of a series after these points, as parameters of _UPDATE."""
    finite = points.values[np.isfinite(points.values)]
    late = points.between(0, -1 if stored.last_step is None else stored.last_step)
    repeated = await _num_stored(tx, stored.id, late) if len(late) else 0
    lows, highs = [float(v) for v in finite], [float(v) for v in finite]
    first, last = int(points.steps[0]), int(points.steps[-1])
    newest = stored.last_step is None or last >= stored.last_step
    value, flag = split(float(points.values[-1])) if newest else (stored.last, stored.last_flag)
    return {
        "key": stored.id,
        "new_count": stored.count + len(points) - repeated,
        "new_non_finite": stored.non_finite + len(points) - len(finite),
        "new_out_of_order": stored.out_of_order + len(late),
        "new_first_step": first if stored.first_step is None else min(first, stored.first_step),
        "new_last_step": last if newest else stored.last_step,
        "new_last": value,
        "new_last_flag": flag,
        "new_min": min([*lows, *([] if stored.min is None else [stored.min])], default=None),
        "new_max": max([*highs, *([] if stored.max is None else [stored.max])], default=None),
    }


async def _num_stored(tx: Tx, series_id: int, late: Points) -> int:
    """How many of the late points' steps are stored already."""
    stored = await chunks.read(tx.connection, series_id, int(late.steps[0]), int(late.steps[-1]))
    return len(np.intersect1d(stored.steps, late.steps))


async def refs(
    connection: AsyncConnection,
    job_id: str,
    *,
    names: Sequence[str] | None = None,
    attempt: int | None = None,
    rank: int | None = None,
) -> list[SeriesRef]:
    """Series of a job, by name, rank and attempt; filtered where a filter is given."""
    statement = select(Series.id, Series.attempt, Series.rank, Series.name).where(Series.job_id == job_id)
    if names is not None:
        statement = statement.where(Series.name.in_(names))
    if attempt is not None:
        statement = statement.where(Series.attempt == attempt)
    if rank is not None:
        statement = statement.where(Series.rank == rank)
    rows = (await connection.execute(statement.order_by(Series.name, Series.rank, Series.attempt))).all()
    return [SeriesRef(*row) for row in rows]


async def stats(connection: AsyncConnection, job_id: str) -> list[SeriesStatsView]:
    """Every series of a job in numbers; no point is read."""
    statement = (
        select(Series.name, Series.rank, Series.attempt, *(getattr(SeriesStats, name) for name in _NUMBERS))
        .join(SeriesStats, SeriesStats.series_id == Series.id)
        .where(Series.job_id == job_id)
        .order_by(Series.name, Series.rank, Series.attempt)
    )
    return [_stats_view(row._mapping) for row in (await connection.execute(statement)).all()]


async def first_steps(connection: AsyncConnection, series_ids: Sequence[int]) -> dict[int, int]:
    """The first step of each series that has points."""
    statement = select(SeriesStats.series_id, SeriesStats.first_step).where(
        SeriesStats.series_id.in_(series_ids), SeriesStats.first_step.is_not(None)
    )
    return {row[0]: int(row[1] or 0) for row in (await connection.execute(statement)).all()}


def _stats_view(row: Mapping[Any, Any]) -> SeriesStatsView:
    return SeriesStatsView(
        name=row["name"],
        rank=row["rank"],
        attempt=row["attempt"],
        unit=unit_of(row["name"]),
        count=row["count"],
        non_finite_count=row["non_finite"],
        out_of_order_count=row["out_of_order"],
        first_step=row["first_step"],
        last_step=row["last_step"],
        last=join(row["last"], row["last_flag"]),
        min=row["min"],
        max=row["max"],
    )
