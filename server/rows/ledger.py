"""Measured traffic of each rank beside the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.models import Attempt, Job, Ledger
from server.rows.series import Owner
from server.views import LedgerEntry, LedgerView, RankLedger
from workers.contract import LedgerRecord
from workers.planner import paper_traffic_bytes


async def put(tx: Tx, owner: Owner, records: Sequence[LedgerRecord]) -> None:
    """Keep the newest step's traffic of a rank."""
    if not records:
        return
    newest = max(records, key=lambda record: record.step)
    values = {"step": newest.step, "bytes": newest.bytes, "seconds": newest.seconds}
    statement = tx.insert(Ledger).values(attempt_id=owner.attempt_id, rank=owner.rank, **values)
    statement = statement.on_conflict_do_update(
        index_elements=["attempt_id", "rank"],
        set_={name: statement.excluded[name] for name in values},
        where=Ledger.step <= newest.step,
    )
    await tx.execute(statement)
    tx.changed("ledger", owner.job_id)


async def view(connection: AsyncConnection, job_id: str, attempt: int | None) -> LedgerView | None:
    """Traffic of one attempt (default: the newest) against its plan; None without the job."""
    job = (await connection.execute(select(Job.attempt, Job.plan, Job.spec).where(Job.id == job_id))).one_or_none()
    if job is None:
        return None
    wanted = attempt or job.attempt
    columns = (Attempt.id, Attempt.stage, Attempt.ranks, Attempt.plan_traffic, Attempt.parameters)
    statement = select(*columns).where(Attempt.job_id == job_id, Attempt.number == wanted)
    row = (await connection.execute(statement)).one_or_none()
    if row is None:
        return LedgerView(job_id=job_id, attempt=None, ranks=[], planned_bytes=0, measured_bytes=0, paper_bytes=None)
    measured = (
        await connection.execute(select(Ledger.__table__).where(Ledger.attempt_id == row.id).order_by(Ledger.rank))
    ).all()
    planned: list[dict[str, int]] = row.plan_traffic or []
    ranks = [_rank(entry, planned[entry.rank] if entry.rank < len(planned) else {}) for entry in measured]
    return LedgerView(
        job_id=job_id,
        attempt=wanted,
        ranks=ranks,
        planned_bytes=sum(sum(purposes.values()) for purposes in planned),
        measured_bytes=sum(rank.measured_bytes for rank in ranks),
        paper_bytes=_paper(job, row),
    )


def _rank(entry: Any, planned: dict[str, int]) -> RankLedger:
    purposes = sorted({*planned, *entry.bytes})
    return RankLedger(
        rank=entry.rank,
        step=entry.step,
        entries=[
            LedgerEntry(
                purpose=purpose,
                planned_bytes=planned.get(purpose),
                measured_bytes=entry.bytes.get(purpose),
                seconds=entry.seconds.get(purpose),
            )
            for purpose in purposes
        ],
        planned_bytes=sum(planned.values()),
        measured_bytes=sum(entry.bytes.values()),
    )


def _paper(job: Row[*tuple[Any, ...]], attempt: Row[*tuple[Any, ...]]) -> int | None:
    """The paper's volume of all ranks; None before the attempt knows its model, when no plan was made for its ranks."""
    if job.plan is not None and job.plan.get("ranks") == attempt.ranks:
        by_stage = {stage["stage"]: stage["paper_traffic_bytes"] for stage in job.plan["stages"]}
        return int(by_stage[attempt.stage]) * int(attempt.ranks)
    if attempt.parameters is None:
        return None
    precision = str(job.spec["train"]["precision"])
    each = paper_traffic_bytes(int(attempt.parameters), int(attempt.stage), int(attempt.ranks), precision)
    return each * int(attempt.ranks)
