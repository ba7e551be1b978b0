"""Charts of a job: the newest attempt's value of a step, older attempts as branches, thinned to a width.

A line is made of segments, one per attempt: attempt k counts up to the first step of the next attempt that has the
series; what it did beyond is a branch of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import numpy as np
from sqlalchemy.ext.asyncio import AsyncConnection

from server.charts import Curve, curve_of_buckets, curve_of_points, draw, moment
from server.points import COLUMNS, LEVELS, Buckets, ChunkError, Points, roll_up
from server.rows import chunks, series
from server.rows.chunks import Extent
from server.rows.series import SeriesRef
from server.views import MetricsView, PointView, SeriesView
from workers.contract import write_number

LAST_STEP = 2**62
READ_PER_WIDTH = 8  # entries read for each point drawn: the finest level with at most so many is taken
MAX_SERIES = 200  # lines of one answer


@dataclass(frozen=True)
class MetricsQuery:
    """What charts are asked for."""

    names: tuple[str, ...]
    width: int = 800
    first: int = 0
    last: int = LAST_STEP
    attempt: int | None = None  # None: the newest attempt's value of a step, older branches beside it
    rank: int | None = None


@dataclass(frozen=True)
class Segment:
    """A part of a line."""

    ref: SeriesRef
    first: int
    last: int


@dataclass(frozen=True)
class Line:
    """What one SeriesView shows."""

    name: str
    rank: int
    attempt: int
    branch: bool
    segments: tuple[Segment, ...]


async def view(connection: AsyncConnection, job_id: str, query: MetricsQuery) -> MetricsView:
    """The lines of a chart. A series that cannot be read says so; the others are drawn."""
    refs = await series.refs(connection, job_id, names=query.names, attempt=query.attempt, rank=query.rank)
    starts = await series.first_steps(connection, [ref.id for ref in refs])
    lines = lines_of(refs, starts, query.first, query.last)
    return MetricsView(
        job_id=job_id, width=query.width, series=[await _draw(connection, line, query) for line in lines[:MAX_SERIES]]
    )


def lines_of(refs: Sequence[SeriesRef], starts: dict[int, int], first: int, last: int) -> list[Line]:
    """Cut the attempts of each (name, rank) into the line that counts and the branches that were given up."""
    groups: dict[tuple[str, int], list[SeriesRef]] = {}
    for ref in refs:
        if ref.id in starts:
            groups.setdefault((ref.name, ref.rank), []).append(ref)
    lines = []
    for (name, rank), attempts in groups.items():
        segments: list[Segment] = []
        branches: list[Line] = []
        cut = LAST_STEP + 1  # first step that a newer attempt has
        for ref in sorted(attempts, key=lambda r: -r.attempt):
            segments.append(Segment(ref, first, min(last, cut - 1)))
            if cut <= last:
                branch = Segment(ref, max(first, cut), last)
                branches.append(Line(name, rank, ref.attempt, True, (branch,)))
            cut = min(cut, starts[ref.id])
        kept = tuple(s for s in reversed(segments) if s.first <= s.last)
        lines.append(Line(name, rank, max(ref.attempt for ref in attempts), False, kept))
        lines += branches
    return lines


async def _draw(connection: AsyncConnection, line: Line, query: MetricsQuery) -> SeriesView:
    try:
        curve, steps_per_point = await _curve(connection, line.segments, query.width)
    except ChunkError as error:
        return _series_view(line, None, [], 1, str(error))
    return _series_view(line, curve, draw(curve, query.width), steps_per_point, None)


def _series_view(
    line: Line, curve: Curve | None, points: list[PointView], steps_per_point: int, error: str | None
) -> SeriesView:
    return SeriesView(
        name=line.name,
        rank=line.rank,
        attempt=line.attempt,
        branch=line.branch,
        unit=series.unit_of(line.name),
        points=points,
        non_finite=list(curve.marks) if curve else [],
        non_finite_count=curve.non_finite_count if curve else 0,
        count=curve.count if curve else 0,
        steps_per_point=steps_per_point,
        error=error,
    )


async def _curve(connection: AsyncConnection, segments: Sequence[Segment], width: int) -> tuple[Curve, int]:
    extents = [await chunks.extent(connection, s.ref.id, s.first, s.last) for s in segments]
    level = level_for(extents, READ_PER_WIDTH * width)
    if level == 0:
        parts = [await chunks.read(connection, s.ref.id, s.first, s.last) for s in segments]
        return curve_of_points(_joined(parts), width), 1
    buckets = [await _buckets(connection, segment, level) for segment in segments]
    return curve_of_buckets(_joined_buckets(buckets), width), 16**level


def level_for(extents: Sequence[Extent], limit: int) -> int:
    """The finest level of which at most `limit` entries are read; 0: raw points."""
    fitting = (level for level in (0, *LEVELS) if sum(each.entries(level) for each in extents) <= limit)
    return next(fitting, LEVELS[-1])


async def _buckets(connection: AsyncConnection, segment: Segment, level: int) -> Buckets:
    """Stored buckets, then the open tail as buckets; those inside the segment's steps."""
    shift = 4 * level
    stored = await chunks.buckets_between(
        connection, segment.ref.id, level, segment.first >> shift, segment.last >> shift
    )
    tail = await chunks.read_tail(connection, segment.ref.id, segment.first, segment.last)
    parts = [stored, roll_up(tail, level)] if len(tail) else [stored]
    joined = _joined_buckets(parts)
    inside = (joined.last_step >= segment.first) & (joined.first_step <= segment.last)
    return Buckets(level=level, **{name: getattr(joined, name)[inside] for name in COLUMNS})


def _joined(parts: Sequence[Points]) -> Points:
    return Points(
        np.concatenate([p.steps for p in parts]),
        np.concatenate([p.at_us for p in parts]),
        np.concatenate([p.values for p in parts]),
    )


def _joined_buckets(parts: Sequence[Buckets]) -> Buckets:
    """One after the other, sorted by where they are drawn (a bucket may stand in two parts)."""
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS}
    order = np.argsort(columns["last_step"], kind="stable")
    return Buckets(level=parts[0].level, **{name: column[order] for name, column in columns.items()})


async def csv_rows(connection: AsyncConnection, job_id: str, query: MetricsQuery) -> AsyncIterator[str]:
    """Every raw point of the default view as CSV text, a series at a time."""
    yield "name,rank,attempt,step,at,value\r\n"
    names = query.names or None
    refs = await series.refs(connection, job_id, names=names, attempt=query.attempt, rank=query.rank)
    starts = await series.first_steps(connection, [ref.id for ref in refs])
    for line in lines_of(refs, starts, query.first, query.last):
        if line.branch:
            continue
        for segment in line.segments:
            points = await chunks.read(connection, segment.ref.id, segment.first, segment.last)
            head = f"{_quoted(line.name)},{line.rank},{segment.ref.attempt}"
            zipped = zip(points.steps.tolist(), points.at_us.tolist(), points.values.tolist(), strict=True)
            yield "".join(f"{head},{s},{moment(a).isoformat()},{write_number(v)}\r\n" for s, a, v in zipped)


def _quoted(text: str) -> str:
    """A CSV field (RFC 4180); one that a spreadsheet would run as a formula gets a quote in front."""
    safe = "'" + text if text[:1] in ("=", "+", "-", "@") else text
    return '"' + safe.replace('"', '""') + '"'
