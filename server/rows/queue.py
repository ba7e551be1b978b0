"""The queue in the order of start, and why a job is where it is."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from server.models import Job
from server.reasons import sentence
from server.rows import jobs, nodes
from server.rows.attempts import reason_view
from server.rows.jobs import JobRecord
from server.rows.nodes import SlotTotals
from server.states import LIVE, RESTING, Status
from server.views import ExplainView, QueueItem, QueueView

QUEUE_SHOWN = 1000


async def view(connection: AsyncConnection) -> QueueView:
    """Waiting jobs: priority (higher first), then time, then id; at most the first QUEUE_SHOWN."""
    statement = (
        select(Job.id, Job.name, Job.ranks, Job.priority, Job.queued_at, Job.reason, Job.reason_data)
        .where(Job.status == Status.QUEUED)
        .order_by(Job.priority.desc(), Job.queued_at, Job.id)
        .limit(QUEUE_SHOWN)
    )
    rows = (await connection.execute(statement)).all()
    slots = await nodes.slot_totals(connection)
    return QueueView(
        items=[
            QueueItem(
                job_id=row.id,
                name=row.name,
                position=position,
                ranks=row.ranks,
                priority=row.priority,
                waiting_since=row.queued_at,
                reason=reason_view(row.reason, row.reason_data),
                unblock=unblock(row.reason, row.ranks, slots),
            )
            for position, row in enumerate(rows, 1)
        ]
    )


async def explain(connection: AsyncConnection, job_id: str, max_ranks: int) -> ExplainView | None:
    """Why this job is where it is, what would move it, and who is ahead; None if there is no such job."""
    job = await jobs.get(connection, job_id)
    if job is None:
        return None
    slots = await nodes.slot_totals(connection)
    waiting = [j.id for j in await jobs.in_status(connection, [Status.QUEUED])] if job.status is Status.QUEUED else []
    position = waiting.index(job_id) + 1 if job_id in waiting else None
    said = sentence(job.reason, job.reason_data) if job.reason else f"The job is {job.status}."
    return ExplainView(
        job_id=job_id,
        status=job.status,
        reason=reason_view(job.reason, job.reason_data),
        sentence=said,
        unblock=_unblock(job, slots),
        position=position,
        jobs_ahead=waiting[: position - 1][:100] if position else [],
        requested_slots=job.ranks,
        free_slots=slots.free,
        total_slots=slots.total,
        max_ranks=max_ranks,
    )


def unblock(reason: str | None, ranks: int, slots: SlotTotals) -> str:
    """What would let a waiting job start."""
    known = {
        "no_capacity": f"Add nodes ({ranks} slots are needed, {slots.total} exist), or resume it on fewer ranks.",
        "waiting_for_slots": f"{max(0, ranks - slots.free)} more free slots: a running job ends, or nodes are added.",
        "reserved": "The job ahead of it starts or leaves the queue.",
        "quota": "Other jobs under this quota end.",
        "backoff": "The time of the next try comes; a resume tries at once.",
        "being_planned": "The plan is made, or cannot be; a spec that names its stage does not wait for it.",
        "cluster_unavailable": "The cluster answers again.",
        "preempted": "The job that needed the slots ends.",
    }
    return known.get(reason or "", "The controller's next look; it takes about a second.")


def _unblock(job: JobRecord, slots: SlotTotals) -> str | None:
    if job.status is Status.QUEUED:
        return unblock(job.reason, job.ranks, slots)
    if job.status in RESTING:
        return "A person resumes it." if job.status is not Status.DELETE_FAILED else "A person deletes it again."
    return "Nothing: it is on its way." if job.status in LIVE else None
