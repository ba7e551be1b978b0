"""Attempts and their ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row, bindparam, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.models import Attempt, Job, RankRow
from server.reasons import sentence
from server.states import AttemptStatus
from server.views import AttemptView, ErrorView, RankView, ReasonView, SavingView
from workers.contract import ResultRecord


@dataclass(frozen=True)
class AttemptRecord:
    """An attempt as the controller needs it."""

    id: str
    job_id: str
    number: int  # the fence
    status: AttemptStatus
    reason: str | None
    reason_data: Mapping[str, Any] | None
    ranks: int
    stage: int
    chunk: int
    device: str | None
    created_at: datetime
    launched_at: datetime | None
    started_at: datetime | None
    stop_at: datetime | None
    kill_at: datetime | None
    ended_at: datetime | None
    released_at: datetime | None
    resume_step: int | None
    resume_checkpoint: str | None
    last_step: int | None
    last_step_at: datetime | None
    last_report_at: datetime | None
    digest: str | None


@dataclass(frozen=True)
class RankRecord:
    """A rank as last reported or observed."""

    attempt_id: str
    rank: int
    status: str
    phase: str | None
    phase_at: datetime | None
    node: str | None
    pid: int | None
    start_ticks: int | None
    step: int
    heartbeat_at: datetime | None
    result: ResultRecord | None


@dataclass(frozen=True)
class RankChange:
    """What is new of a rank: status, phase, node, pid, start_ticks, step, heartbeat_at, result (as JSON)."""

    attempt_id: str
    rank: int
    values: Mapping[str, Any]


@dataclass(frozen=True)
class NewAttempt:
    """A launch that is about to happen."""

    id: str
    job_id: str
    number: int
    ranks: int
    stage: int
    chunk: int
    device: str
    token_hash: str
    resume_step: int | None = None
    resume_checkpoint: str | None = None  # checkpoint id


_ATTEMPT = [getattr(Attempt, name) for name in AttemptRecord.__dataclass_fields__]
_RANK = [getattr(RankRow, name) for name in RankRecord.__dataclass_fields__]


async def create(tx: Tx, new: NewAttempt) -> bool:
    """Insert an attempt in `starting` with its ranks, the job's newest. False if its number is not the next one."""
    statement = (
        update(Job)
        .where(Job.id == new.job_id, Job.attempt == new.number - 1)
        .values(attempt=new.number, stage=new.stage)
    )
    if (await tx.execute(statement)).rowcount != 1:
        return False
    fields = {name: getattr(new, name) for name in NewAttempt.__dataclass_fields__}
    await tx.execute(insert(Attempt).values(**fields, status=AttemptStatus.STARTING, created_at=tx.now))
    await tx.execute(insert(RankRow), [{"attempt_id": new.id, "rank": rank} for rank in range(new.ranks)])
    tx.changed("job", new.job_id)
    return True


async def get(connection: AsyncConnection, attempt_id: str) -> AttemptRecord | None:
    """One attempt, or None."""
    row = (await connection.execute(select(*_ATTEMPT).where(Attempt.id == attempt_id))).one_or_none()
    return None if row is None else _record(row)


async def newest(connection: AsyncConnection, job_id: str) -> AttemptRecord | None:
    """The newest attempt of a job, or None before the first."""
    statement = select(*_ATTEMPT).where(Attempt.job_id == job_id).order_by(Attempt.number.desc()).limit(1)
    row = (await connection.execute(statement)).one_or_none()
    return None if row is None else _record(row)


async def unreleased(connection: AsyncConnection) -> list[AttemptRecord]:
    """Every attempt of which something may still exist on the cluster."""
    statement = select(*_ATTEMPT).where(Attempt.status != AttemptStatus.RELEASED).order_by(Attempt.created_at)
    return [_record(row) for row in (await connection.execute(statement)).all()]


async def ranks_of(connection: AsyncConnection, attempt_ids: Collection[str]) -> dict[str, list[RankRecord]]:
    """The ranks of attempts, in order."""
    if not attempt_ids:
        return {}
    statement = select(*_RANK).where(RankRow.attempt_id.in_(attempt_ids)).order_by(RankRow.attempt_id, RankRow.rank)
    found: dict[str, list[RankRecord]] = {attempt_id: [] for attempt_id in attempt_ids}
    for row in (await connection.execute(statement)).all():
        fields = dict(row._mapping)
        result = fields["result"]
        fields["result"] = None if result is None else ResultRecord.model_validate(result)
        found[row.attempt_id].append(RankRecord(**fields))
    return found


async def transition(
    tx: Tx, attempt_id: str, new: AttemptStatus, *, allowed: Collection[AttemptStatus], **values: Any
) -> bool:
    """Move an attempt when its status is in `allowed`; False when somebody else moved it."""
    assert AttemptStatus.RELEASED not in allowed, "a released attempt never changes"
    statement = (
        update(Attempt).where(Attempt.id == attempt_id, Attempt.status.in_(allowed)).values(status=new, **values)
    )
    moved = (await tx.execute(statement)).rowcount == 1
    if moved:
        await _tell(tx, attempt_id)
    return moved


async def set_values(tx: Tx, attempt_id: str, **values: Any) -> None:
    """Set columns of an attempt that are not its status."""
    assert "status" not in values, "status moves by transition() only"
    await tx.execute(update(Attempt).where(Attempt.id == attempt_id).values(**values))


async def set_ranks(tx: Tx, changes: Collection[RankChange]) -> None:
    """Set columns of ranks, in one statement for all whose changes are of the same columns."""
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for change in changes:
        place = {"of_attempt": change.attempt_id, "of_rank": change.rank}
        alike.setdefault(tuple(sorted(change.values)), []).append({**place, **change.values})
    of_rank = (RankRow.attempt_id == bindparam("of_attempt"), RankRow.rank == bindparam("of_rank"))
    for rows in alike.values():
        await tx.execute(update(RankRow).where(*of_rank), rows)


async def views(
    connection: AsyncConnection, job_id: str, *, now: datetime, number: int | None = None
) -> list[AttemptView]:
    """Attempts of a job with their ranks, newest first; only `number` when given."""
    statement = select(Attempt.__table__).where(Attempt.job_id == job_id).order_by(Attempt.number.desc())
    if number is not None:
        statement = statement.where(Attempt.number == number)
    rows = (await connection.execute(statement)).all()
    ranks = await ranks_of(connection, [row.id for row in rows])
    return [_view(row, [_rank_view(rank, now) for rank in ranks[row.id]]) for row in rows]


def reason_view(code: str | None, data: Mapping[str, Any] | None) -> ReasonView | None:
    """A stored reason with its sentence."""
    return None if code is None else ReasonView(code=code, sentence=sentence(code, data))


def _view(row: Row[Any], ranks: list[RankView]) -> AttemptView:
    return AttemptView(
        id=row.id,
        number=row.number,
        status=AttemptStatus(row.status),
        reason=reason_view(row.reason, row.reason_data),
        error=None if row.error is None else ErrorView.model_validate(row.error),
        ranks=row.ranks,
        stage=row.stage,
        device=row.device,
        created_at=row.created_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
        resumed_from_step=row.resume_step,
        resumed_from_checkpoint=row.resume_checkpoint,
        first_step=row.first_step,
        last_step=row.last_step,
        digest=row.digest,
        saving=_saving(row),
        rank_states=ranks,
    )


def _saving(row: Row[Any]) -> SavingView | None:
    """Nothing of an attempt that has ended: whatever it had begun was cut short."""
    if row.saving_step is None or row.reason is not None:
        return None
    return SavingView(step=row.saving_step, since=row.saving_since)


def _rank_view(rank: RankRecord, now: datetime) -> RankView:
    result = rank.result
    age = None if rank.heartbeat_at is None else max(0.0, (now - rank.heartbeat_at).total_seconds())
    return RankView.model_validate(
        {
            "rank": rank.rank,
            "status": rank.status,
            "phase": rank.phase,
            "node": rank.node,
            "pid": rank.pid,
            "step": rank.step,
            "heartbeat_age_seconds": age,
            "exit_code": None if result is None else result.exit_code,
            "signal": None if result is None else result.signal,
            "peak_rss_bytes": None if result is None else result.peak_rss,
        }
    )


async def _tell(tx: Tx, attempt_id: str) -> None:
    row = (await tx.execute(select(Attempt.job_id).where(Attempt.id == attempt_id))).one()
    tx.changed("job", row.job_id)


def _record(row: Row[Any]) -> AttemptRecord:
    fields = dict(row._mapping)
    return AttemptRecord(**{**fields, "status": AttemptStatus(fields["status"])})
