"""Logs: lines of all ranks of a job in chunks, numbered over the whole job in the order in which they came.

The line that a rank is writing now (a progress bar) is kept apart and shown at the end of the log. An attempt keeps a
head and a tail of its output; what a chatty job prints in between is dropped and counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, func, select, update
from sqlalchemy import insert as plain_insert
from sqlalchemy.ext.asyncio import AsyncConnection

from server.charts import moment
from server.db import Tx
from server.logtext import Line, OpenLine, finish, read_piece
from server.models import Attempt, Job, LogChunk, LogOpenLine
from server.rows.series import Owner, microseconds
from server.views import LogLine, LogView
from workers.contract import LogRecord

CHUNK_LINES = 500
HEAD_SHARE = 8  # of an attempt's bytes one in eight is kept from the beginning
SCANNED_CHUNKS = 2000  # of one answer to a search
STREAMS = ("stdout", "stderr", "shardyard")


async def append(tx: Tx, owner: Owner, records: Sequence[LogRecord], cap_bytes: int, *, closed: bool) -> None:
    """Store the lines that a batch finishes; with `closed` the unfinished ones too."""
    if not records and not closed:
        return
    states = await _open_lines(tx, owner)
    found: list[tuple[datetime, str, Line]] = []
    at = dict.fromkeys(STREAMS, tx.now)
    for record in records:
        state, lines = read_piece(states.get(record.stream, OpenLine()), record.text)
        states[record.stream], at[record.stream] = state, record.at
        found += [(record.at, record.stream, line) for line in lines]
    if closed:
        found += [(at[stream], stream, line) for stream, state in states.items() for line in finish(state)]
        states = {stream: OpenLine() for stream in states}
    await _put_open_lines(tx, owner, states, at)
    for start in range(0, len(found), CHUNK_LINES):
        await _put_chunk(tx, owner, found[start : start + CHUNK_LINES])
    if found:
        await _drop_middle(tx, owner, cap_bytes)
    tx.changed("logs", owner.job_id)


async def _open_lines(tx: Tx, owner: Owner) -> dict[str, OpenLine]:
    statement = select(LogOpenLine.stream, LogOpenLine.text, LogOpenLine.carriage_return, LogOpenLine.escape).where(
        LogOpenLine.attempt_id == owner.attempt_id, LogOpenLine.rank == owner.rank
    )
    rows = (await tx.execute(statement)).all()
    return {row.stream: OpenLine(row.text, row.carriage_return, row.escape) for row in rows}


async def _put_open_lines(tx: Tx, owner: Owner, states: dict[str, OpenLine], at: dict[str, datetime]) -> None:
    await tx.execute(
        delete(LogOpenLine).where(LogOpenLine.attempt_id == owner.attempt_id, LogOpenLine.rank == owner.rank)
    )
    rows = [
        {
            "attempt_id": owner.attempt_id,
            "rank": owner.rank,
            "stream": stream,
            "at": at[stream],
            "text": state.text,
            "carriage_return": state.carriage_return,
            "escape": state.escape,
        }
        for stream, state in states.items()
        if state != OpenLine()
    ]
    if rows:
        await tx.execute(plain_insert(LogOpenLine), rows)


async def _put_chunk(tx: Tx, owner: Owner, lines: Sequence[tuple[datetime, str, Line]]) -> None:
    first = (await tx.execute(select(Job.log_seq).where(Job.id == owner.job_id))).scalar_one() + 1
    text = "\n".join(line.text for _, _, line in lines)
    num_bytes = len(text.encode()) + 1
    await tx.execute(
        plain_insert(LogChunk).values(
            job_id=owner.job_id,
            first_seq=first,
            last_seq=first + len(lines) - 1,
            attempt_id=owner.attempt_id,
            attempt=owner.attempt,
            rank=owner.rank,
            num_bytes=num_bytes,
            text=text,
            meta=[[microseconds(at), STREAMS.index(stream), int(line.split)] for at, stream, line in lines],
        )
    )
    await tx.execute(update(Job).where(Job.id == owner.job_id).values(log_seq=first + len(lines) - 1))
    await tx.execute(
        update(Attempt).where(Attempt.id == owner.attempt_id).values(log_bytes=Attempt.log_bytes + num_bytes)
    )


async def _drop_middle(tx: Tx, owner: Owner, cap_bytes: int) -> None:
    """Remove the oldest chunks behind the head until the attempt is within its cap again."""
    kept = (await tx.execute(select(Attempt.log_bytes).where(Attempt.id == owner.attempt_id))).scalar_one()
    if kept <= cap_bytes:
        return
    of_attempt = (LogChunk.job_id == owner.job_id) & (LogChunk.attempt_id == owner.attempt_id)
    statement = select(LogChunk.first_seq, LogChunk.num_bytes).where(of_attempt).order_by(LogChunk.first_seq)
    seen, dropped, doomed = 0, 0, []
    rows = (await tx.execute(statement)).all()
    for row in rows[:-1]:  # the newest chunk stays
        seen += row.num_bytes
        if seen > cap_bytes // HEAD_SHARE and kept - dropped > cap_bytes - cap_bytes // HEAD_SHARE:
            doomed.append(row.first_seq)
            dropped += row.num_bytes
    for start in range(0, len(doomed), 500):
        await tx.execute(delete(LogChunk).where(of_attempt, LogChunk.first_seq.in_(doomed[start : start + 500])))
    await tx.execute(
        update(Attempt)
        .where(Attempt.id == owner.attempt_id)
        .values(log_bytes=Attempt.log_bytes - dropped, log_dropped_bytes=Attempt.log_dropped_bytes + dropped)
    )


async def view(
    connection: AsyncConnection,
    job_id: str,
    *,
    attempt: int | None,
    rank: int | None,
    search: str,
    before: int | None,
    after: int | None,
    limit: int,
) -> LogView:
    """A window of the log: lines after `after`, or before `before`, or the newest; each in time order."""
    chunks = select(LogChunk.__table__).where(LogChunk.job_id == job_id)
    if attempt is not None:
        chunks = chunks.where(LogChunk.attempt == attempt)
    if rank is not None:
        chunks = chunks.where(LogChunk.rank == rank)
    if search.isascii() and search:  # the databases fold ASCII only; other text is searched line by line
        chunks = chunks.where(LogChunk.text.icontains(search, autoescape=True))
    forward = after is not None
    if after is not None:
        chunks = chunks.where(LogChunk.last_seq > after).order_by(LogChunk.first_seq)
    else:
        chunks = chunks.order_by(LogChunk.first_seq.desc())
        if before is not None:
            chunks = chunks.where(LogChunk.first_seq < before)
    lines = await _collect(connection, chunks, forward, after, before, search, limit + 1)
    more = len(lines) > limit
    lines = lines[:limit] if forward else lines[max(0, len(lines) - limit) :]
    oldest = lines[0].seq if lines else 0
    if before is None and not (forward and more):  # everything up to the end was looked at
        newest = int(await connection.scalar(select(Job.log_seq).where(Job.id == job_id)) or 0)
        if limit:
            lines = lines + await _unfinished(connection, job_id, attempt, rank, search, newest)
    else:
        newest = lines[-1].seq if lines else (before or 1) - 1
    return LogView(
        items=_by_time(lines),
        next_before=oldest if oldest > 1 and (forward or more) else None,
        next_after=newest,
        dropped_bytes=await _dropped(connection, job_id, attempt),
    )


async def _collect(
    connection: AsyncConnection,
    chunks: Any,
    forward: bool,
    after: int | None,
    before: int | None,
    search: str,
    wanted: int,
) -> list[LogLine]:
    """At least `wanted` matching lines if there are so many, in order of seq; chunks are read one screen at a time."""
    found: list[LogLine] = []
    folded = search.casefold()
    size, offset = max(1, min(50, wanted // 20)), 0
    while offset < SCANNED_CHUNKS and len(found) < wanted:
        rows = (await connection.execute(chunks.limit(size).offset(offset))).all()
        for row in rows:
            lines = [
                line
                for line in _lines(row)
                if (after is None or line.seq > after)
                and (before is None or line.seq < before)
                and (not folded or folded in line.text.casefold())
            ]
            found = found + lines if forward else lines + found
            if len(found) >= wanted:
                break
        if len(rows) < size:
            break
        offset += size
        size = min(200, size * 2)
    return found


def _lines(row: Row[Any]) -> list[LogLine]:
    meta = row.meta
    texts = row.text.split("\n")
    return [
        LogLine.model_construct(
            seq=row.first_seq + index,
            attempt=row.attempt,
            rank=row.rank,
            at=moment(at_us),
            stream=STREAMS[stream],
            text=text,
            split=bool(split),
        )
        for index, (text, (at_us, stream, split)) in enumerate(zip(texts, meta, strict=True))
    ]


def _by_time(lines: Sequence[LogLine]) -> list[LogLine]:
    """Ranks merged by time; the lines of one rank keep their order, whatever its clock did."""
    ranks: dict[tuple[int, int], list[LogLine]] = {}
    for line in lines:
        ranks.setdefault((line.attempt, line.rank), []).append(line)
    return list(heapq.merge(*ranks.values(), key=lambda line: (line.attempt, line.at, line.seq)))


async def _unfinished(
    connection: AsyncConnection, job_id: str, attempt: int | None, rank: int | None, search: str, newest: int
) -> list[LogLine]:
    """The lines that are being written now, numbered as the next ones would be."""
    statement = (
        select(LogOpenLine.rank, LogOpenLine.stream, LogOpenLine.at, LogOpenLine.text, Attempt.number.label("attempt"))
        .join(Attempt, Attempt.id == LogOpenLine.attempt_id)
        .where(Attempt.job_id == job_id, LogOpenLine.text != "")
        .order_by(LogOpenLine.rank, LogOpenLine.stream)
    )
    if attempt is not None:
        statement = statement.where(Attempt.number == attempt)
    if rank is not None:
        statement = statement.where(LogOpenLine.rank == rank)
    rows = (await connection.execute(statement)).all()
    return [
        LogLine.model_validate({**row._mapping, "seq": newest + index, "open": True})
        for index, row in enumerate(rows, 1)
        if search.casefold() in row.text.casefold()
    ]


async def _dropped(connection: AsyncConnection, job_id: str, attempt: int | None) -> int:
    statement = select(func.coalesce(func.sum(Attempt.log_dropped_bytes), 0)).where(Attempt.job_id == job_id)
    if attempt is not None:
        statement = statement.where(Attempt.number == attempt)
    return int(await connection.scalar(statement) or 0)


async def text_after(connection: AsyncConnection, job_id: str, after: int, rank: int | None) -> tuple[int, str] | None:
    """The next piece of a download as (last seq, text); None at the end."""
    statement = select(LogChunk.last_seq, LogChunk.text).where(LogChunk.job_id == job_id, LogChunk.first_seq > after)
    if rank is not None:
        statement = statement.where(LogChunk.rank == rank)
    rows = (await connection.execute(statement.order_by(LogChunk.first_seq).limit(50))).all()
    return (rows[-1].last_seq, "".join(row.text + "\n" for row in rows)) if rows else None
