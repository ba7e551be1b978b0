"""The family of a job: what it was cloned or forked from, what was made from it, and how each attempt began."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import Row, select
from sqlalchemy.ext.asyncio import AsyncConnection

from server.models import Attempt, Checkpoint, Job
from server.states import AttemptStatus, Status
from server.views import LineageAttempt, LineageJob, LineageLink, LineageView

MOST_JOBS = 100
_JOB = (Job.id, Job.name, Job.status, Job.steps, Job.cloned_from, Job.forked_from, Job.fork_step)
_ATTEMPT = (
    Attempt.job_id, Attempt.number, Attempt.status, Attempt.ranks, Attempt.stage, Attempt.created_at,
    Attempt.resume_step, Attempt.resume_checkpoint, Attempt.last_step,
)  # fmt: skip
_CHECKPOINT = (
    Checkpoint.id,
    Checkpoint.job_id,
    Checkpoint.attempt,
    Checkpoint.step,
    Checkpoint.ranks,
    Checkpoint.stage,
)


async def view(connection: AsyncConnection, job_id: str) -> LineageView | None:
    """Ancestors, the job, and everything made from it, at most MOST_JOBS; None when there is no such job."""
    family = await _family(connection, job_id)
    if not family:
        return None
    shown = dict(list(family.items())[:MOST_JOBS])
    attempts = await _rows(connection, _ATTEMPT, Attempt.job_id, list(shown), Attempt.number)
    named = {row.resume_checkpoint for row in attempts} | {row.forked_from for row, _ in shown.values()}
    points = {row.id: row for row in await _rows(connection, _CHECKPOINT, Checkpoint.id, named - {None}, Checkpoint.id)}
    return LineageView(
        job_id=job_id,
        jobs=[_job(row, generation, attempts) for row, generation in shown.values()],
        links=[*_resumes(attempts, points), *_origins(shown, attempts, points)],
        truncated=len(family) > MOST_JOBS,
    )


async def _family(connection: AsyncConnection, job_id: str) -> dict[str, tuple[Row[Any], int]]:
    """Job rows with their generation, the oldest ancestor first; one more than is shown, when there is."""
    line = await _line(connection, job_id)
    found = {row.id: (row, index - len(line) + 1) for index, row in enumerate(line)}
    newest, generation = [job_id] if line else [], 0
    while newest and len(found) <= MOST_JOBS:
        generation += 1
        children = await _rows(connection, _JOB, Job.cloned_from, newest, Job.id)
        fresh = [row for row in children if row.id not in found][: MOST_JOBS + 1 - len(found)]
        found |= {row.id: (row, generation) for row in fresh}
        newest = [row.id for row in fresh]
    return found


async def _line(connection: AsyncConnection, job_id: str) -> list[Row[Any]]:
    """The job after its ancestors; a removed ancestor ends the line."""
    line: list[Row[Any]] = []
    wanted: str | None = job_id
    while wanted is not None and len(line) < MOST_JOBS:
        found = await _rows(connection, _JOB, Job.id, [wanted], Job.id)
        if not found:
            break
        line += found
        wanted = found[0].cloned_from
    return line[::-1]


async def _rows(
    connection: AsyncConnection, columns: Sequence[Any], key: Any, values: Collection[str], order: Any
) -> list[Row[Any]]:
    if not values:
        return []
    return list((await connection.execute(select(*columns).where(key.in_(values)).order_by(key, order))).all())


def _job(row: Row[Any], generation: int, attempts: Sequence[Row[Any]]) -> LineageJob:
    kind: Literal["original", "clone", "fork"] = "original" if row.cloned_from is None else "clone"
    return LineageJob(
        id=row.id,
        name=row.name,
        status=Status(row.status),
        generation=generation,
        kind="fork" if row.forked_from is not None else kind,
        steps=row.steps,
        attempts=[_attempt(each) for each in attempts if each.job_id == row.id],
    )


def _attempt(row: Row[Any]) -> LineageAttempt:
    first = row.resume_step or 0
    return LineageAttempt(
        number=row.number,
        status=AttemptStatus(row.status),
        ranks=row.ranks,
        stage=row.stage,
        created_at=row.created_at,
        first_step=first,
        last_step=max(row.last_step or 0, first),
    )


def _resumes(attempts: Sequence[Row[Any]], points: Mapping[str, Row[Any]]) -> list[LineageLink]:
    """Attempts that began from a checkpoint; of another job when it is a fork."""
    links = []
    for row in attempts:
        point = points.get(row.resume_checkpoint or "")
        if point is not None:
            links.append(_link("resume" if point.job_id == row.job_id else "fork", point, row.job_id, row))
    return links


def _origins(
    family: Mapping[str, tuple[Row[Any], int]], attempts: Sequence[Row[Any]], points: Mapping[str, Row[Any]]
) -> list[LineageLink]:
    """Clones, and forks that have not started."""
    links = []
    first = {row.job_id: row for row in reversed(attempts)}
    for row, _ in family.values():
        point = points.get(row.forked_from or "")
        if point is not None and row.id not in first:
            links.append(_link("fork", point, row.id, None))
        if row.forked_from is None and row.cloned_from in family:
            links.append(_clone(row, first.get(row.id)))
    return links


def _link(kind: Literal["resume", "fork"], point: Row[Any], job_id: str, to: Row[Any] | None) -> LineageLink:
    return LineageLink(
        kind=kind,
        from_job=point.job_id,
        from_attempt=point.attempt,
        to_job=job_id,
        to_attempt=None if to is None else to.number,
        checkpoint=point.id,
        step=point.step,
        from_ranks=point.ranks,
        from_stage=point.stage,
        to_ranks=None if to is None else to.ranks,
        to_stage=None if to is None else to.stage,
        resharded=to is not None and (to.ranks, to.stage) != (point.ranks, point.stage),
    )


def _clone(row: Row[Any], to: Row[Any] | None) -> LineageLink:
    return LineageLink(
        kind="clone",
        from_job=row.cloned_from,
        from_attempt=None,
        to_job=row.id,
        to_attempt=None if to is None else to.number,
        checkpoint=None,
        step=0,
        from_ranks=None,
        from_stage=None,
        to_ranks=None if to is None else to.ranks,
        to_stage=None if to is None else to.stage,
        resharded=False,
    )
