"""Memory samples: bytes of a rank by category, and how they stand beside the plan and the paper's lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, Select, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.models import Attempt, Job, MemorySample
from server.rows.series import Owner
from server.views import MemorySampleView, MemoryView, StageBytes
from workers.contract import MemoryRecord
from zero_engine.config import STAGES
from zero_engine.plan import paper_bytes_per_parameter

CATEGORIES = (
    "params",
    "grads",
    "sums",
    "master",
    "moments",
    "buckets",
    "slots",
    "pinned",
    "activations",
    "other",
    "allocated",
    "reserved",
    "rss",
)


async def append(tx: Tx, owner: Owner, records: Sequence[MemoryRecord]) -> None:
    """Store samples; of one (step, phase) the last one counts."""
    if not records:
        return
    place = {"attempt_id": owner.attempt_id, "rank": owner.rank}
    rows = {(r.step, r.phase): {**place, **r.model_dump(exclude={"kind"})} for r in records}
    statement = tx.insert(MemorySample)
    statement = statement.on_conflict_do_update(
        index_elements=["attempt_id", "step", "rank", "phase"],
        set_={name: statement.excluded[name] for name in ("at", *CATEGORIES)},
    )
    await tx.execute(statement, list(rows.values()))
    tx.changed("memory", owner.job_id)


async def view(
    connection: AsyncConnection,
    job_id: str,
    *,
    attempt: int | None,
    rank: int | None,
    first: int,
    last: int,
    width: int,
) -> MemoryView | None:
    """Samples of one attempt (default: the newest), at most about `width` steps of each rank; None without the job."""
    facts = select(Job.attempt, Job.ranks, Job.plan, Job.spec).where(Job.id == job_id)
    job = (await connection.execute(facts)).one_or_none()
    if job is None:
        return None
    wanted = attempt or job.attempt
    of_job = (Attempt.job_id == job_id) & (Attempt.number == wanted)
    columns = select(Attempt.id, Attempt.ranks, Attempt.plan_memory, Attempt.parameters).where(of_job)
    row = (await connection.execute(columns)).one_or_none()
    paper = _paper(job, row)
    if row is None:
        return MemoryView(job_id=job_id, attempt=None, ranks=job.ranks, samples=[], phases=[], plan=[], paper=paper)
    within = (MemorySample.attempt_id == row.id) & MemorySample.step.between(first, last)
    if rank is not None:
        within &= MemorySample.rank == rank
    return MemoryView(
        job_id=job_id,
        attempt=wanted,
        ranks=row.ranks,
        samples=await _samples(connection, within, wanted, width),
        phases=await _newest(connection, row.id, wanted, rank),
        plan=row.plan_memory or [],
        paper=paper,
    )


def _paper(job: Row[*tuple[Any, ...]], attempt: Row[*tuple[Any, ...]] | None) -> list[StageBytes]:
    """The paper's bytes per rank by stage: of the attempt once its model is known, before that as planned at submit."""
    if attempt is None or attempt.parameters is None:
        return [StageBytes(stage=s["stage"], bytes=s["paper_bytes"]) for s in (job.plan or {}).get("stages", [])]
    precision = job.spec["train"]["precision"]
    each = {stage: paper_bytes_per_parameter(stage, attempt.ranks, precision) for stage in STAGES}
    return [StageBytes(stage=stage, bytes=round(attempt.parameters * size)) for stage, size in each.items()]


async def _samples(connection: AsyncConnection, within: Any, attempt: int, width: int) -> list[MemorySampleView]:
    """Each run of steps as one sample: the greatest bytes of each category at its last step."""
    span = (
        await connection.execute(select(func.min(MemorySample.step), func.max(MemorySample.step)).where(within))
    ).one()
    if span[0] is None:
        return []
    steps_each = max(1, -(-(span[1] - span[0] + 1) // width))
    run = (MemorySample.step - span[0]) // steps_each
    columns = [func.max(getattr(MemorySample, name)).label(name) for name in ("step", "at", *CATEGORIES)]
    statement: Select[Any] = (
        select(MemorySample.rank, MemorySample.phase, *columns)
        .where(within)
        .group_by(MemorySample.rank, MemorySample.phase, run)
        .order_by(func.max(MemorySample.step), MemorySample.rank, MemorySample.phase)
    )
    return [_view(row, attempt) for row in (await connection.execute(statement)).all()]


async def _newest(
    connection: AsyncConnection, attempt_id: str, attempt: int, rank: int | None
) -> list[MemorySampleView]:
    newest = (
        select(MemorySample.rank, MemorySample.phase, func.max(MemorySample.step).label("step"))
        .where(MemorySample.attempt_id == attempt_id)
        .group_by(MemorySample.rank, MemorySample.phase)
        .subquery()
    )
    statement: Select[Any] = (
        select(MemorySample.__table__)
        .join(
            newest,
            (MemorySample.rank == newest.c.rank)
            & (MemorySample.phase == newest.c.phase)
            & (MemorySample.step == newest.c.step),
        )
        .where(MemorySample.attempt_id == attempt_id)
        .order_by(MemorySample.rank, MemorySample.phase)
    )
    if rank is not None:
        statement = statement.where(MemorySample.rank == rank)
    return [_view(row, attempt) for row in (await connection.execute(statement)).all()]


def _view(row: Any, attempt: int) -> MemorySampleView:
    fields = {name: row._mapping[name] for name in MemorySampleView.model_fields if name != "attempt"}
    return MemorySampleView(attempt=attempt, **fields)
