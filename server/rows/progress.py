"""What a batch of reports says about its rank, its attempt and its job: phase, step, loss, speed, digest, sparkline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from sqlalchemy import Row, select, update

from server.db import Tx
from server.models import Attempt, Job, RankRow
from server.rows.numbers import split
from server.rows.series import Owner
from server.sparkline import Sparkline
from workers.contract import (
    CheckpointRecord,
    EventRecord,
    LedgerRecord,
    MemoryRecord,
    PhaseRecord,
    PointsRecord,
    Record,
    ReportBatch,
    ResultRecord,
)

PHASES = ("started", "preparing", "joining", "building", "restoring", "training", "saving", "finished")
DIGEST = "run.digest"  # a rank's event: data.step, data.digest
R = TypeVar("R")


def of_kind(records: Sequence[Record], kind: type[R]) -> list[R]:
    """The records of one kind, in order."""
    return [record for record in records if isinstance(record, kind)]


async def bring_up_to_date(tx: Tx, owner: Owner, batch: ReportBatch, place: Row[Any], *, live: bool) -> None:
    """Write what a batch says about its rank, its attempt and, when that is the newest one, its job.

    `place` is the row of the attempt and its job before the batch; `live`: the attempt may still move the job's phase.
    """
    points = of_kind(batch.records, PointsRecord)
    phases, results = of_kind(batch.records, PhaseRecord), of_kind(batch.records, ResultRecord)
    sampled = [r.step for r in batch.records if isinstance(r, (MemoryRecord, LedgerRecord))]  # every rank has these
    await _summarise_rank(tx, owner, [*sampled, *(p.step for p in points)], phases, results)
    await _summarise_attempt(tx, owner, place, points, results)
    if place.newest != place.number:
        return
    values = _job_numbers(place, points)
    digests = [(r.step, r.digest) for r in of_kind(batch.records, CheckpointRecord)]
    digests += [(r.step, r.digest) for r in results if r.digest]
    digests += [_digest(record) for record in of_kind(batch.records, EventRecord) if record.action == DIGEST]
    if digests:
        values["digest"] = max(digests)[1]
    if live:
        values["last_report_at"] = tx.now
        if phases or place.phase is None:
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
    tx: Tx, owner: Owner, place: Row[Any], points: Sequence[PointsRecord], results: Sequence[ResultRecord]
) -> None:
    values: dict[str, Any] = {"last_report_at": tx.now}
    trained = [p for p in points if "loss" in p.values]
    if trained:
        steps = [p.step for p in trained]
        values["first_step"] = min([*steps, *([] if place.first_step is None else [place.first_step])])
        values["last_step"] = max([*steps, *([] if place.last_step is None else [place.last_step])])
        values["last_step_at"] = max(p.at for p in trained)
    digests = [r.digest for r in results if r.digest]
    if digests:
        values["digest"] = digests[-1]
    await tx.execute(update(Attempt).where(Attempt.id == owner.attempt_id).values(**values))


def _job_numbers(place: Row[Any], points: Sequence[PointsRecord]) -> dict[str, Any]:
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
            known = values.get("step_seconds", place.step_seconds)
            values["step_seconds"] = value if known is None else 0.9 * known + 0.1 * value
    curve = Sparkline(tuple(place.sparkline), place.sparkline_stride if place.sparkline else 1)
    for point in trained:
        curve = curve.after(point.step, split(point.values["loss"])[0])
    values |= {"sparkline": list(curve.values), "sparkline_stride": curve.stride}
    return values


async def _slowest_phase(tx: Tx, attempt_id: str) -> str | None:
    """The phase that the slowest rank is in; None before every rank has said one."""
    found = (await tx.execute(select(RankRow.phase).where(RankRow.attempt_id == attempt_id))).scalars().all()
    known = [PHASES.index(phase) for phase in found if phase in PHASES]
    return PHASES[min(known)] if known else None
