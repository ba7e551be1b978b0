"""From rows to the frozen facts that decisions look at."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from server.controller.snapshot import AttemptFacts, JobFacts, Policy, RankFacts
from server.models import Attempt, ReportSeq
from server.rows import attempts, checkpoints, jobs, plans
from server.rows.attempts import RankRecord
from server.settings import Settings
from server.states import ACTIVE
from workers.contract import AttemptId, JobId


@dataclass(frozen=True)
class Loaded:
    """What the database says, at one moment."""

    jobs: tuple[JobFacts, ...]
    attempts: tuple[AttemptFacts, ...]
    ranks: dict[str, list[RankRecord]]  # by attempt id
    released: frozenset[str] = frozenset()  # attempts of ours that have ended, among those that were asked about
    plans_wanted: bool = False


def policy_of(settings: Settings) -> Policy:
    """The part of the settings that decisions depend on."""
    return Policy(**{name: getattr(settings, name) for name in Policy.__dataclass_fields__ if hasattr(settings, name)})


async def load(connection: AsyncConnection, seen: Collection[str] = ()) -> Loaded:
    """Every job with something to do, and every attempt that may still exist; `seen` are those on the cluster."""
    records = await jobs.in_status(connection, ACTIVE)
    living = await attempts.unreleased(connection)
    ranks = await attempts.ranks_of(connection, [a.id for a in living])
    closed = await _closed(connection, [a.id for a in living])
    known = {record.id for record in records}
    ending = {a.job_id for a in living if a.reason is not None}
    facts = [await job_facts(connection, record) if record.id in ending else _job_facts(record) for record in records]
    unplanned = await plans.unplanned(connection)
    needing = {record.id for record in records if record.id in unplanned and _takes_stage_from_plan(record)}
    facts = [replace(each, needs_plan=each.id in needing) for each in facts]
    return Loaded(
        tuple(facts),
        tuple(attempt_facts(a, ranks[a.id], closed) for a in living if a.job_id in known),
        ranks,
        await _released(connection, set(seen) - ranks.keys()),
        bool(unplanned),
    )


def _takes_stage_from_plan(job: jobs.JobRecord) -> bool:
    """Ours are planned at the launch, for the slots that they get; a user's model takes too long to build."""
    return bool(job.spec["zero"]["stage"] == "auto" and job.spec["model"]["kind"] == "python")


async def _released(connection: AsyncConnection, attempt_ids: Collection[str]) -> frozenset[str]:
    if not attempt_ids:
        return frozenset()
    return frozenset((await connection.execute(select(Attempt.id).where(Attempt.id.in_(attempt_ids)))).scalars())


async def job_facts(connection: AsyncConnection, job: jobs.JobRecord) -> JobFacts:
    """A job whose attempt ends, as decisions see it."""
    point = await checkpoints.resume_point(connection, job.id)
    return _job_facts(job, point.step if point else 0)


def _job_facts(job: jobs.JobRecord, checkpoint_step: int = 0) -> JobFacts:
    resources, restart = job.spec["resources"], job.spec["restart"]  # a stored spec is complete and was validated
    return JobFacts(
        id=JobId(job.id),
        status=job.status,
        desired=job.desired,
        priority=job.priority,
        queued_at=job.queued_at,
        ranks=job.ranks,
        device=resources["device"],
        stop_grace_seconds=job.spec["stop_grace_seconds"],
        steps=job.steps,
        fence=job.attempt,
        reason=job.reason,
        reason_data=dict(job.reason_data or {}),
        not_before=job.not_before,
        desired_at=job.desired_at,
        user_failures=job.user_failures,
        infrastructure_failures=job.infrastructure_failures,
        user_budget=restart["user_failures"],
        infrastructure_budget=restart["infrastructure_failures"],
        progress_step=job.progress_step,
        checkpoint_step=checkpoint_step,
    )


def attempt_facts(
    attempt: attempts.AttemptRecord, ranks: Sequence[RankRecord], closed: frozenset[tuple[str, int]]
) -> AttemptFacts:
    """An attempt as decisions see it."""
    return AttemptFacts(
        id=AttemptId(attempt.id),
        job_id=JobId(attempt.job_id),
        fence=attempt.number,
        status=attempt.status,
        device=attempt.device or "cpu",
        created_at=attempt.created_at,
        ranks=tuple(_rank_facts(rank, closed) for rank in ranks),
        reason=attempt.reason,
        reason_data=dict(attempt.reason_data or {}),
        launched_at=attempt.launched_at,
        started_at=attempt.started_at,
        stop_at=attempt.stop_at,
        kill_at=attempt.kill_at,
        ended_at=attempt.ended_at,
        last_step_at=attempt.last_step_at,
    )


def _rank_facts(rank: RankRecord, closed: frozenset[tuple[str, int]]) -> RankFacts:
    return RankFacts(
        rank=rank.rank,
        phase=rank.phase,
        phase_at=rank.phase_at,
        step=rank.step,
        result=rank.result,
        closed=(rank.attempt_id, rank.rank) in closed,
        node=rank.node,
    )


async def _closed(connection: AsyncConnection, attempt_ids: Sequence[str]) -> frozenset[tuple[str, int]]:
    if not attempt_ids:
        return frozenset()
    statement = select(ReportSeq.attempt_id, ReportSeq.rank).where(
        ReportSeq.attempt_id.in_(attempt_ids), ReportSeq.closed
    )
    return frozenset((row.attempt_id, row.rank) for row in (await connection.execute(statement)).all())
