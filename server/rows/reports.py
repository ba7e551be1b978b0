"""What ranks say, applied once.

Note: why a repeat changes nothing. A rank's actor sends batch n until it hears that n was applied, then n + 1. The
highest batch applied per (attempt, rank) is a row that is locked first and written in the same transaction as the
batch's content. A repeat is older than that row and skipped, a gap is refused by naming the row, and a lost answer is a
repeat.

The fence guards state, not data: what an ended attempt still has to say is stored, but moves neither the job's status
nor the numbers of a newer attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Row, select, update

from server.db import Tx
from server.errors import ApiError
from server.models import Attempt, Job, RankRow, ReportSeq
from server.rows import attempts, checkpoints, events, ledger, logs, memory, series
from server.rows.jobs import SPARKLINE_VALUES, stride
from server.rows.numbers import split
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
    Record,
    ReportBatch,
    ResultRecord,
)

PHASES = ("started", "preparing", "joining", "building", "restoring", "training", "saving", "finished")
LARGEST = 2**53  # of steps and counts: what every JSON reader keeps exact
MAX_SERIES = 5000  # of one attempt and rank
REFUSED = "checkpoint.refused"  # a rank's event: the checkpoint in data.folder could not be read
DIGEST = "run.digest"  # a rank's event: data.step, data.digest
R = TypeVar("R")


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
    attempt = (await tx.execute(select(Attempt.job_id).where(Attempt.id == batch.attempt_id))).one_or_none()
    if attempt is None:
        raise ApiError(404, "There is no such attempt; its job was deleted.", code="unknown_attempt")
    job = await _lock_job(tx, attempt.job_id)  # before everything else: the same order as a transition's
    found = await _attempt(tx, batch)
    applied = await _applied_seq(tx, batch)
    live = job.attempt == found.number and found.released_at is None and job.status in LIVE
    if batch.seq != applied + 1:
        return Applied(applied, live)
    owner = Owner(attempt.job_id, batch.attempt_id, found.number, batch.rank)
    await _store(tx, owner, batch, log_bytes)
    await _summarise(tx, owner, batch, job, newest=job.attempt == found.number, live=live)
    if batch.closed or any(isinstance(record, (PhaseRecord, ResultRecord)) for record in batch.records):
        tx.work()
    await tx.execute(
        update(ReportSeq)
        .where(ReportSeq.attempt_id == batch.attempt_id, ReportSeq.rank == batch.rank)
        .values(seq=batch.seq, closed=batch.closed, updated_at=tx.now)
    )
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


async def _lock_job(tx: Tx, job_id: str) -> Row[Any]:
    statement = select(
        Job.attempt, Job.status, Job.step, Job.steps, Job.sparkline, Job.sparkline_stride, Job.phase, Job.step_seconds
    )
    return (await tx.execute(statement.where(Job.id == job_id).with_for_update())).one()


async def _attempt(tx: Tx, batch: ReportBatch) -> Row[Any]:
    statement = select(Attempt.number, Attempt.ranks, Attempt.released_at, Attempt.first_step, Attempt.last_step)
    found = (await tx.execute(statement.where(Attempt.id == batch.attempt_id))).one()
    if found.number != batch.fence:
        raise ApiError(403, f"The fence {batch.fence} is not this attempt's.", code="wrong_fence")
    if batch.rank >= found.ranks or batch.rank < 0:
        raise ApiError(404, f"The attempt has no rank {batch.rank}.", code="unknown_rank")
    return found


async def _applied_seq(tx: Tx, batch: ReportBatch) -> int:
    key = {"attempt_id": batch.attempt_id, "rank": batch.rank}
    await tx.execute(tx.insert(ReportSeq).values(**key, seq=0, updated_at=tx.now).on_conflict_do_nothing())
    statement = select(ReportSeq.seq).where(ReportSeq.attempt_id == batch.attempt_id, ReportSeq.rank == batch.rank)
    return int((await tx.execute(statement.with_for_update())).one().seq)


def _of(records: Sequence[Record], kind: type[R]) -> list[R]:
    return [record for record in records if isinstance(record, kind)]


async def _store(tx: Tx, owner: Owner, batch: ReportBatch, log_bytes: int) -> None:
    records = batch.records
    await series.append(tx, owner, _of(records, PointsRecord))
    await memory.append(tx, owner, _of(records, MemoryRecord))
    await logs.append(tx, owner, _of(records, LogRecord), log_bytes, closed=batch.closed)
    for record in records:
        if isinstance(record, LedgerRecord):
            await ledger.put(tx, owner, record)
        elif isinstance(record, CheckpointRecord):
            await _store_checkpoint(tx, owner, record)
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


async def _store_event(tx: Tx, owner: Owner, record: EventRecord) -> None:
    folder = record.data.get("folder")
    if record.action == REFUSED and isinstance(folder, str):
        await checkpoints.mark_corrupt_folder(tx, owner.job_id, folder, record.message)
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


async def _summarise(tx: Tx, owner: Owner, batch: ReportBatch, job: Row[Any], *, newest: bool, live: bool) -> None:
    """Bring the rows of rank, attempt and job up to date with a batch."""
    points = _of(batch.records, PointsRecord)
    phases, results = _of(batch.records, PhaseRecord), _of(batch.records, ResultRecord)
    sampled = [r.step for r in batch.records if isinstance(r, (MemoryRecord, LedgerRecord))]  # every rank has these
    await _summarise_rank(tx, owner, [*sampled, *(p.step for p in points)], phases, results)
    await _summarise_attempt(tx, owner, points, results)
    if not newest:
        return
    values = _job_numbers(job, points)
    digests = [(r.step, r.digest) for r in _of(batch.records, CheckpointRecord)]
    digests += [(r.step, r.digest) for r in results if r.digest]
    digests += [_digest(record) for record in _of(batch.records, EventRecord) if record.action == DIGEST]
    if digests:
        values["digest"] = max(digests)[1]
    if live:
        values["last_report_at"] = tx.now
        if phases or job.phase is None:
            values["phase"] = await _slowest_phase(tx, owner.attempt_id)
    if values:
        await tx.execute(update(Job).where(Job.id == owner.job_id).values(**values))
    if phases or results or digests or points:
        tx.changed("job", owner.job_id)


def _digest(record: EventRecord) -> tuple[int, str]:
    step, digest = record.data.get("step"), record.data.get("digest")
    return (step if isinstance(step, int) else 0, str(digest)[:64])


async def _summarise_rank(
    tx: Tx,
    owner: Owner,
    steps: Sequence[int],
    phases: Sequence[PhaseRecord],
    results: Sequence[ResultRecord],
) -> None:
    values: dict[str, Any] = {"heartbeat_at": tx.now}
    if phases:
        values |= {"phase": phases[-1].phase, "phase_at": phases[-1].at}
    done = [*steps, *(r.step for r in results)]
    if done:
        values["step"] = max(done)
    if results:
        values["result"] = results[-1].model_dump(mode="json")
    of_rank = (RankRow.attempt_id == owner.attempt_id) & (RankRow.rank == owner.rank)
    await tx.execute(update(RankRow).where(of_rank).values(**values))


async def _summarise_attempt(
    tx: Tx, owner: Owner, points: Sequence[PointsRecord], results: Sequence[ResultRecord]
) -> None:
    values: dict[str, Any] = {"last_report_at": tx.now}
    trained = [p for p in points if "loss" in p.values]
    if trained:
        known = select(Attempt.first_step, Attempt.last_step).where(Attempt.id == owner.attempt_id)
        found = (await tx.execute(known)).one()
        steps = [p.step for p in trained]
        values["first_step"] = min([*steps, *([] if found.first_step is None else [found.first_step])])
        values["last_step"] = max([*steps, *([] if found.last_step is None else [found.last_step])])
        values["last_step_at"] = max(p.at for p in trained)
    digests = [r.digest for r in results if r.digest]
    if digests:
        values["digest"] = digests[-1]
    await tx.execute(update(Attempt).where(Attempt.id == owner.attempt_id).values(**values))


def _job_numbers(job: Row[Any], points: Sequence[PointsRecord]) -> dict[str, Any]:
    """What the newest points say about the job as a whole."""
    trained = sorted((p for p in points if "loss" in p.values), key=lambda p: p.step)
    if not trained:
        return {}
    newest = trained[-1]
    values: dict[str, Any] = {"step": newest.step}
    values["loss"], values["loss_flag"] = split(newest.values["loss"])
    speed = newest.values.get("tokens_per_second")
    if speed is not None:
        values["tokens_per_second"] = split(speed)[0]
    seconds = [split(p.values["seconds"])[0] for p in trained if "seconds" in p.values]
    for value in seconds:
        if value is not None:
            known = values.get("step_seconds", job.step_seconds)
            values["step_seconds"] = value if known is None else 0.9 * known + 0.1 * value
    values["sparkline"] = sparkline(job.sparkline, job.sparkline_stride or stride(job.steps), trained)
    return values


def sparkline(old: Sequence[float | None], steps_each: int, trained: Sequence[PointsRecord]) -> list[float | None]:
    """The sparkline after these points: one value for every `steps_each` steps; a step back cuts what was beyond."""
    values = list(old)
    for point in trained:
        place = max(0, point.step - 1) // steps_each
        if place < SPARKLINE_VALUES:
            values = [*values[:place], *([None] * (place - len(values))), split(point.values["loss"])[0]]
    return values


async def _slowest_phase(tx: Tx, attempt_id: str) -> str | None:
    """The phase that the slowest rank is in; None before every rank has said one."""
    found = (await tx.execute(select(RankRow.phase).where(RankRow.attempt_id == attempt_id))).scalars().all()
    known = [PHASES.index(phase) for phase in found if phase in PHASES]
    return PHASES[min(known)] if known else None
