"""What ranks say, applied once.

Note: why a repeat changes nothing. A rank's actor sends batch n until it hears that n was applied, then n + 1. The
highest batch applied per (attempt, rank) is a row that is locked first and written in the same transaction as the
batch's content. A repeat is older than that row and skipped, a gap is refused by naming the row, and a lost answer is a
repeat.

The fence guards state, not data: what an ended attempt still has to say is stored, but moves neither the job's status
nor the numbers of a newer attempt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, bindparam, select, update

from server.db import Tx
from server.errors import ApiError
from server.models import Attempt, Job, ReportSeq
from server.rows import attempts, checkpoints, events, ledger, logs, memory, progress, series
from server.rows.progress import of_kind
from server.rows.series import Owner
from server.states import LIVE
from server.views import FieldProblem
from workers.contract import (
    CheckpointRecord,
    EventRecord,
    LedgerRecord,
    LogRecord,
    MemoryRecord,
    PhaseRecord,
    PlanRecord,
    PointsRecord,
    ReportBatch,
    ResultRecord,
    SaveRecord,
)

LARGEST = 2**53  # of steps and counts: what every JSON reader keeps exact
MAX_SERIES = 5000  # of one attempt and rank
REFUSED = "checkpoint.refused"  # a rank's event: the checkpoint in data.folder cannot be used; data.damaged: for good
FALLBACK = "checkpoint.fallback"  # and the one in data.folder, of data.step, was read in its place
_PLACE = (
    select(
        Attempt.job_id,
        Attempt.number,
        Attempt.ranks.label("num_ranks"),
        Attempt.released_at,
        Attempt.first_step,
        Attempt.last_step,
        Job.attempt.label("newest"),
        Job.status,
        Job.phase,
        Job.sparkline,
        Job.sparkline_stride,
        Job.step_seconds,
    )
    .join(Job, Job.id == Attempt.job_id)
    .where(Attempt.id == bindparam("attempt_id"))
    .with_for_update(of=Job)
)
_APPLIED = select(ReportSeq.seq).where(
    ReportSeq.attempt_id == bindparam("of_attempt"), ReportSeq.rank == bindparam("of_rank")
)


@dataclass(frozen=True)
class Applied:
    """What became of a batch."""

    seq: int  # highest applied for this (attempt, rank)
    live: bool  # the attempt is the job's newest and not yet released


async def apply(tx: Tx, batch: ReportBatch, log_bytes: int) -> Applied:
    """Apply a batch whose turn it is; any other is answered with the highest seq applied.

    Raises ApiError 404 for an unknown attempt or rank, 403 for a wrong fence, 422 for a record that cannot be stored.
    """
    check_batch(batch)
    place = await _lock_place(tx, batch)  # the job before everything else: the same order as a transition's
    live = place.newest == place.number and place.released_at is None and place.status in LIVE
    applied = await _applied_seq(tx, batch)
    if batch.seq != applied + 1:
        return Applied(applied, live)
    owner = Owner(place.job_id, batch.attempt_id, place.number, batch.rank)
    await _store(tx, owner, batch, log_bytes)
    await progress.bring_up_to_date(tx, owner, batch, place, live=live)
    if batch.closed or any(isinstance(record, (PhaseRecord, ResultRecord)) for record in batch.records):
        tx.work()
    await _put_applied(tx, batch)
    return Applied(batch.seq, live)


def check_batch(batch: ReportBatch) -> None:
    """Refuse a batch with a number that cannot be stored, whole. Raises ApiError 422 naming the record."""
    for index, record in enumerate(batch.records):
        for name, value in record:
            if isinstance(value, int) and abs(value) > LARGEST:
                raise _bad_record(f"/records/{index}/{name}", f"{value} is beyond 2**53", value)
        for name in getattr(record, "values", ()) if isinstance(record, PointsRecord) else ():
            if not name or len(name) > 200 or "\0" in name:
                raise _bad_record(f"/records/{index}/values", "a series name has 1 to 200 characters", name)


def _bad_record(pointer: str, message: str, value: object) -> ApiError:
    problem = FieldProblem(pointer=pointer, message=message, value=repr(value)[:120])
    return ApiError(422, f"{pointer}: {message}", code="invalid_record", errors=[problem])


async def _lock_place(tx: Tx, batch: ReportBatch) -> Row[Any]:
    """The attempt and its job in one row; the job is kept from changing until the transaction ends."""
    place = (await tx.execute(_PLACE, {"attempt_id": batch.attempt_id})).one_or_none()
    if place is None:
        raise ApiError(404, "There is no such attempt; its job was deleted.", code="unknown_attempt")
    if place.number != batch.fence:
        raise ApiError(403, f"The fence {batch.fence} is not this attempt's.", code="wrong_fence")
    if not 0 <= batch.rank < place.num_ranks:
        raise ApiError(404, f"The attempt has no rank {batch.rank}.", code="unknown_rank")
    return place


async def _applied_seq(tx: Tx, batch: ReportBatch) -> int:
    key = {"of_attempt": batch.attempt_id, "of_rank": batch.rank}
    row = (await tx.execute(_APPLIED, key)).one_or_none()
    return 0 if row is None else int(row.seq)


async def _put_applied(tx: Tx, batch: ReportBatch) -> None:
    values = {"seq": batch.seq, "closed": batch.closed, "updated_at": tx.now}
    statement = tx.insert(ReportSeq).values(attempt_id=batch.attempt_id, rank=batch.rank, **values)
    await tx.execute(statement.on_conflict_do_update(index_elements=["attempt_id", "rank"], set_=values))


async def _store(tx: Tx, owner: Owner, batch: ReportBatch, log_bytes: int) -> None:
    records = batch.records
    await series.append(tx, owner, of_kind(records, PointsRecord))
    await memory.append(tx, owner, of_kind(records, MemoryRecord))
    await logs.append(tx, owner, of_kind(records, LogRecord), log_bytes, closed=batch.closed)
    await ledger.put(tx, owner, of_kind(records, LedgerRecord))
    for record in records:
        if isinstance(record, CheckpointRecord):
            await _store_checkpoint(tx, owner, record)
        elif isinstance(record, SaveRecord):
            await _store_save(tx, owner, record)
        elif isinstance(record, EventRecord):
            await _store_event(tx, owner, record)
        elif isinstance(record, PlanRecord):
            await attempts.set_values(
                tx,
                owner.attempt_id,
                plan_memory=record.memory,
                plan_traffic=record.traffic,
                parameters=record.parameters,
            )
            tx.changed("memory", owner.job_id)


async def _store_checkpoint(tx: Tx, owner: Owner, record: CheckpointRecord) -> None:
    if await checkpoints.record(tx, owner.job_id, owner.attempt, record) is None:
        return
    size = sum(shard.bytes for shard in record.shards)
    await events.append(
        tx,
        owner.job_id,
        "checkpoint.saved",
        f"Checkpoint of step {record.step}: {size:,} bytes in {record.seconds:.2f} s.",
        actor=f"rank:{owner.rank}",
        attempt=owner.attempt,
        rank=owner.rank,
        data={"step": record.step, "folder": record.folder, "digest": record.digest},
    )


async def _store_save(tx: Tx, owner: Owner, record: SaveRecord) -> None:
    """What the attempt saves now."""
    if record.state == "begun":
        await attempts.set_values(tx, owner.attempt_id, saving_step=record.step, saving_since=record.at)
    else:
        of_save = (Attempt.id == owner.attempt_id) & (Attempt.saving_step == record.step)
        await tx.execute(update(Attempt).where(of_save).values(saving_step=None, saving_since=None))
    tx.changed("job", owner.job_id)


async def _store_event(tx: Tx, owner: Owner, record: EventRecord) -> None:
    folder = record.data.get("folder")
    if record.action in (REFUSED, FALLBACK) and isinstance(folder, str):
        found = await checkpoints.read_by(tx.connection, owner.job_id, owner.attempt_id, folder)
        if found is not None and record.action == FALLBACK:
            values = {"resume_checkpoint": found.id, "resume_step": found.step}
            await attempts.set_values(tx, owner.attempt_id, **values)
        elif found is not None and record.data.get("damaged"):
            await checkpoints.mark_corrupt(tx, found, record.message)
    await events.append(
        tx,
        owner.job_id,
        record.action,
        record.message,
        actor=f"rank:{owner.rank}",
        attempt=owner.attempt,
        rank=owner.rank,
        data=_without_nan(record.data),
    )


def _without_nan(value: Any) -> Any:
    """JSON that every reader takes: non-finite floats as their names."""
    if isinstance(value, dict):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return repr(value) if isinstance(value, float) and value - value != 0 else value
