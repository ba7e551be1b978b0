"""Measured traffic of each rank beside the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.models import Attempt, Job, Ledger
from server.rows.series import Owner
from server.views import LedgerEntry, LedgerView, RankLedger
from workers.contract import LedgerRecord


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
    job = (await connection.execute(select(Job.attempt, Job.plan).where(Job.id == job_id))).one_or_none()
    if job is None:
        return None
    wanted = attempt or job.attempt
    statement = select(Attempt.id, Attempt.stage, Attempt.ranks, Attempt.plan_traffic).where(
        Attempt.job_id == job_id, Attempt.number == wanted
    )
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
        paper_bytes=_paper(job.plan, row.stage, row.ranks),
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


def _paper(plan: dict[str, Any] | None, stage: int, ranks: int) -> int | None:
    """The paper's volume of all ranks, when the plan was made for as many."""
    if plan is None or plan.get("ranks") != ranks:
        return None
    return next((s["paper_traffic_bytes"] * ranks for s in plan["stages"] if s["stage"] == stage), None)
