"""Points in tables: an open tail, sealed chunks of 512, rollups by powers of 16.

Note: why rollups are computed at the seal, from the raw points. A bucket is never adjusted, it is computed again from
all sealed points that fall into it, so that late, repeated and overwritten steps need no special case and a rollup can
always be checked against its points. Between seals the open tail (under 512 points) is added when a chart is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.models import PointChunk, PointTail, Rollup
from server.points import CHUNK_POINTS, COLUMNS, LEVELS, Buckets, Points, merge, pack, roll_up, roll_up_again, unpack
from server.rows.numbers import join, split


async def put_tail(tx: Tx, batches: Sequence[tuple[int, Points]]) -> None:
    """Add points to the tails of series, given by id; a step that is there gets its new value."""
    rows = []
    for series_id, points in batches:
        columns = zip(points.steps.tolist(), points.at_us.tolist(), points.values.tolist(), strict=True)
        for step, at_us, value in columns:
            finite, flag = split(value)
            rows.append({"series_id": series_id, "step": step, "at_us": at_us, "value": finite, "flag": flag})
    statement = tx.insert(PointTail)
    statement = statement.on_conflict_do_update(
        index_elements=["series_id", "step"],
        set_={name: statement.excluded[name] for name in ("at_us", "value", "flag")},
    )
    await tx.execute(statement, rows)


@dataclass(frozen=True)
class TailState:
    """How far a series is sealed."""

    num_chunks: int
    count: int  # points in the tail, at most


async def seal(tx: Tx, series_id: int, num_chunks: int) -> TailState:
    """Turn every whole 512 points of the tail into a chunk."""
    tail = await _tail(tx.connection, series_id)
    whole = len(tail) // CHUNK_POINTS * CHUNK_POINTS
    if not whole:
        return TailState(num_chunks, len(tail))
    sealed = [tail.cut(start, start + CHUNK_POINTS) for start in range(0, whole, CHUNK_POINTS)]
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
            for index, chunk in enumerate(sealed)
        ],
    )
    last = int(tail.steps[whole - 1])
    await tx.execute(delete(PointTail).where(PointTail.series_id == series_id, PointTail.step <= last))
    await _roll_up(tx, series_id, int(tail.steps[0]), last)
    return TailState(num_chunks + len(sealed), len(tail) - whole)


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


@dataclass(frozen=True)
class Extent:
    """About how many raw points a range of steps has, and over how many steps they lie."""

    points: int  # whole chunks are counted, and the tail
    steps: int

    def entries(self, level: int) -> int:
        """At most so many entries are read at a level; 0: raw points."""
        return self.points if level == 0 else min(self.points, (self.steps >> (4 * level)) + 2)


async def extent(connection: AsyncConnection, series_id: int, first: int, last: int) -> Extent:
    """How much there is to read with first <= step <= last; no point is looked at."""
    sealed = select(
        func.coalesce(func.sum(PointChunk.count), 0), func.min(PointChunk.first_step), func.max(PointChunk.last_step)
    ).where(PointChunk.series_id == series_id, PointChunk.last_step >= first, PointChunk.first_step <= last)
    tail = select(func.count(), func.min(PointTail.step), func.max(PointTail.step)).where(
        PointTail.series_id == series_id, PointTail.step.between(first, last)
    )
    rows = [(await connection.execute(statement)).one() for statement in (sealed, tail)]
    ends = [(row[1], row[2]) for row in rows if row[1] is not None]
    if not ends:
        return Extent(0, 0)
    low, high = max(first, min(end[0] for end in ends)), min(last, max(end[1] for end in ends))
    return Extent(sum(int(row[0]) for row in rows), high - low + 1)


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
