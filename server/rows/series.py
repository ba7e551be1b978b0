"""Series of points: appended to a tail, sealed into chunks of 512, rolled up by powers of 16.

Note: why rollups are computed at the seal, from the raw points. A bucket is never adjusted, it is computed again from
all sealed points that fall into it, so that late, repeated and overwritten steps need no special case and a rollup can
always be checked against its points. Between seals the open tail (under 512 points) is added when a chart is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy import bindparam, delete, exists, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.models import PointChunk, PointTail, Rollup, Series, SeriesStats
from server.points import CHUNK_POINTS, COLUMNS, LEVELS, Buckets, Points, merge, pack, roll_up, roll_up_again, unpack
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


_STATS = ("count", "non_finite", "out_of_order", "first_step", "last_step", "last", "last_flag", "min", "max")
_STORED: dict[str, Any] = {name: getattr(Series, name) for name in ("id", "name", "num_chunks", "tail_count")} | {
    name: getattr(SeriesStats, name) for name in _STATS
}
_UPDATE_STATS = (
    update(SeriesStats)
    .where(SeriesStats.series_id == bindparam("key"))
    .values(**{name: bindparam(f"new_{name}") for name in _STATS})
)
_UPDATE_TAIL = update(Series).where(Series.id == bindparam("key")).values(tail_count=bindparam("new_tail"))


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
    stats = [await _new_stats(tx, stored, points) for stored, points in batches]
    await _put_tail(tx, batches)
    await tx.execute(_UPDATE_STATS, stats)
    tails = []
    for stored, points in batches:
        tail_count = stored.tail_count + len(points)
        if tail_count >= CHUNK_POINTS:
            tail_count = await _seal(tx, stored.id, stored.num_chunks)
        tails.append({"key": stored.id, "new_tail": tail_count})
    await tx.execute(_UPDATE_TAIL, tails)
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
    """The named series of an attempt and rank, made where they do not exist."""
    of_owner = (Series.attempt_id == owner.attempt_id) & (Series.rank == owner.rank)
    statement = (
        select(*(column.label(name) for name, column in _STORED.items()))
        .join(SeriesStats, SeriesStats.series_id == Series.id)
        .where(of_owner)
    )
    known = {row.name: _Stored(**row._mapping) for row in (await tx.execute(statement)).all()}
    missing = [name for name in names if name not in known]
    if not missing:
        return known
    place = {"job_id": owner.job_id, "attempt_id": owner.attempt_id, "attempt": owner.attempt, "rank": owner.rank}
    await tx.execute(insert(Series), [{**place, "name": name} for name in missing])
    without_stats = select(Series.id).where(of_owner, ~exists().where(SeriesStats.series_id == Series.id))
    ids = (await tx.execute(without_stats)).scalars().all()
    await tx.execute(insert(SeriesStats), [{"series_id": series_id} for series_id in ids])
    return {row.name: _Stored(**row._mapping) for row in (await tx.execute(statement)).all()}


async def _put_tail(tx: Tx, batches: Sequence[tuple[_Stored, Points]]) -> None:
    rows = []
    for stored, points in batches:
        columns = zip(points.steps.tolist(), points.at_us.tolist(), points.values.tolist(), strict=True)
        for step, at_us, value in columns:
            finite, flag = split(value)
            rows.append({"series_id": stored.id, "step": step, "at_us": at_us, "value": finite, "flag": flag})
    statement = tx.insert(PointTail)
    statement = statement.on_conflict_do_update(
        index_elements=["series_id", "step"],
        set_={name: statement.excluded[name] for name in ("at_us", "value", "flag")},
    )
    await tx.execute(statement, rows)


async def _new_stats(tx: Tx, stored: _Stored, points: Points) -> dict[str, Any]:
    """The stats of a series after these points, as parameters of _UPDATE_STATS."""
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
    stored = await read(tx.connection, series_id, int(late.steps[0]), int(late.steps[-1]))
    return len(np.intersect1d(stored.steps, late.steps))


async def _seal(tx: Tx, series_id: int, num_chunks: int) -> int:
    """Turn every whole 512 points of the tail into a chunk; returns how many stay."""
    tail = await _tail(tx.connection, series_id)
    whole = len(tail) // CHUNK_POINTS * CHUNK_POINTS
    if not whole:
        return len(tail)
    chunks = [tail.cut(start, start + CHUNK_POINTS) for start in range(0, whole, CHUNK_POINTS)]
    await tx.execute(
        insert(PointChunk),
        [
            {
                "series_id": series_id,
                "number": num_chunks + index,
                "first_step": int(chunk.steps[0]),
                "last_step": int(chunk.steps[-1]),
                "count": len(chunk),
                "points": pack(chunk),
            }
            for index, chunk in enumerate(chunks)
        ],
    )
    last = int(tail.steps[whole - 1])
    await tx.execute(delete(PointTail).where(PointTail.series_id == series_id, PointTail.step <= last))
    await _roll_up(tx, series_id, int(tail.steps[0]), last)
    await tx.execute(update(Series).where(Series.id == series_id).values(num_chunks=num_chunks + len(chunks)))
    return len(tail) - whole


async def _roll_up(tx: Tx, series_id: int, first: int, last: int) -> None:
    """Compute again every bucket that [first, last] touches: level 1 from points, the others from the level below."""
    low, high = first >> 4, last >> 4
    sealed = await _sealed(tx.connection, series_id, low << 4, (high << 4) + 15)
    buckets = roll_up(sealed, 1)
    await _put_buckets(tx, series_id, buckets)
    for level in LEVELS[1:]:
        low, high = low >> 4, high >> 4
        below = await buckets_between(tx.connection, series_id, level - 1, low << 4, (high << 4) + 15)
        await _put_buckets(tx, series_id, roll_up_again(below))


async def _put_buckets(tx: Tx, series_id: int, buckets: Buckets) -> None:
    columns = {name: getattr(buckets, name).tolist() for name in COLUMNS}
    rows = [
        {"series_id": series_id, "level": buckets.level}
        | {name: _storable(column[index]) for name, column in columns.items()}
        for index in range(len(buckets))
    ]
    statement = tx.insert(Rollup)
    statement = statement.on_conflict_do_update(
        index_elements=["series_id", "level", "bucket"],
        set_={name: statement.excluded[name] for name in COLUMNS if name != "bucket"},
    )
    await tx.execute(statement, rows)


def _storable(value: float) -> float | None:
    return value if math.isfinite(value) else None


async def buckets_between(connection: AsyncConnection, series_id: int, level: int, first: int, last: int) -> Buckets:
    """Stored buckets of a level with first <= bucket <= last, in order."""
    statement = (
        select(*(getattr(Rollup, name) for name in COLUMNS))
        .where(Rollup.series_id == series_id, Rollup.level == level, Rollup.bucket.between(first, last))
        .order_by(Rollup.bucket)
    )
    rows = (await connection.execute(statement)).all()
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(COLUMNS)
    arrays: dict[str, Any] = {}
    for name, column in zip(COLUMNS, columns, strict=True):
        kind = np.float64 if name in ("min", "max", "first", "last", "sum") else np.int64
        arrays[name] = np.array(column, dtype=kind)
    return Buckets(level=level, **arrays)


async def count_between(connection: AsyncConnection, series_id: int, first: int, last: int) -> int:
    """About how many raw points a range has: whole chunks are counted, and the tail."""
    in_chunks = select(func.coalesce(func.sum(PointChunk.count), 0)).where(
        PointChunk.series_id == series_id, PointChunk.last_step >= first, PointChunk.first_step <= last
    )
    in_tail = select(func.count()).where(PointTail.series_id == series_id, PointTail.step.between(first, last))
    chunks, tail = await connection.scalar(in_chunks), await connection.scalar(in_tail)
    return int(chunks or 0) + int(tail or 0)


async def read(connection: AsyncConnection, series_id: int, first: int, last: int) -> Points:
    """Every raw point with first <= step <= last. Raises ChunkError when a chunk is damaged."""
    sealed = await _sealed(connection, series_id, first, last)
    return merge([sealed, (await _tail(connection, series_id)).between(first, last)])


async def read_tail(connection: AsyncConnection, series_id: int, first: int, last: int) -> Points:
    """The points of the open tail in a range."""
    return (await _tail(connection, series_id)).between(first, last)


async def _sealed(connection: AsyncConnection, series_id: int, first: int, last: int) -> Points:
    statement = (
        select(PointChunk.points, PointChunk.count)
        .where(PointChunk.series_id == series_id, PointChunk.last_step >= first, PointChunk.first_step <= last)
        .order_by(PointChunk.number)
    )
    rows = (await connection.execute(statement)).all()
    return merge([unpack(row[0], row[1]) for row in rows]).between(first, last)


async def _tail(connection: AsyncConnection, series_id: int) -> Points:
    statement = (
        select(PointTail.step, PointTail.at_us, PointTail.value, PointTail.flag)
        .where(PointTail.series_id == series_id)
        .order_by(PointTail.step)
    )
    rows = (await connection.execute(statement)).all()
    return Points(
        np.array([row.step for row in rows], np.int64),
        np.array([row.at_us for row in rows], np.int64),
        np.array([join(row.value, row.flag) for row in rows], np.float64),
    )


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
        select(Series.name, Series.rank, Series.attempt, *(getattr(SeriesStats, name) for name in _STATS))
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
