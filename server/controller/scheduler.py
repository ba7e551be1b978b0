"""The controller's decisions: `plan(snapshot, now)` is pure, and everything it wants is in the commands it returns.

A gang starts whole or not at all. The order is priority, then the time of submit; the first job that would fit an empty
cluster but not the present one holds the free slots of its kind until it fits, so that a stream of small jobs cannot
starve a big one. Note: no job is let past it, since nobody knows how long a job will run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from server.controller.actions import Command, Data, Delete, Explain, Start, Sweep
from server.controller.cluster import ClusterState, Node
from server.controller.snapshot import JobFacts, Snapshot
from server.controller.supervision import supervise, watch
from server.reasons import sentence
from server.states import AttemptStatus, Desired, Status


def plan(snapshot: Snapshot, now: datetime) -> list[Command]:
    """Everything to do now, in the order in which to do it."""
    return [
        *_supervised(snapshot, now),
        *_sight(snapshot),
        *_sweep(snapshot, now),
        *schedule(snapshot, now),
        *(Delete(job.id) for job in snapshot.jobs if job.status is Status.DELETING),
    ]


def _supervised(snapshot: Snapshot, now: datetime) -> Iterator[Command]:
    jobs = {job.id: job for job in snapshot.jobs}
    for attempt in snapshot.attempts:
        if attempt.id not in snapshot.launching:
            yield from supervise(watch(snapshot, jobs[attempt.job_id], attempt, now))


def _sight(snapshot: Snapshot) -> Iterator[Command]:
    """Running jobs that went out of sight, and those that came back."""
    if snapshot.cluster is None:
        return
    jobs = {job.id: job for job in snapshot.jobs}
    going = {attempt.id: jobs[attempt.job_id] for attempt in snapshot.attempts if not attempt.reason}
    for state in snapshot.cluster.attempts:
        job = going.get(state.attempt_id)
        if job is None or job.desired is not Desired.RUN or job.status is not Status.RUNNING:
            continue
        silent = [r for r in state.ranks if r.heartbeat_age_seconds >= snapshot.policy.unreachable_seconds]
        silent = [r for r in silent if r.status == "running"]
        if silent and job.reason != "unreachable":
            yield Explain(job.id, job.status, "unreachable", {"rank": silent[0].rank, "node": silent[0].node_id})
        elif not silent and job.reason == "unreachable":
            yield Explain(job.id, job.status, "running")


def _sweep(snapshot: Snapshot, now: datetime) -> Iterator[Command]:
    if snapshot.cluster is None:
        return
    known = {attempt.id for attempt in snapshot.attempts}
    for state in snapshot.cluster.attempts:
        since = snapshot.unknown_since.get(state.attempt_id)
        if state.attempt_id in known or since is None:
            continue
        if (now - since).total_seconds() >= snapshot.policy.sweep_seconds:
            yield Sweep(state.attempt_id, state.job_id)


@dataclass
class Pool:
    """The slots of one kind of device, while the queue is walked."""

    device: str
    total: int
    free: int
    slot_memory_bytes: int | None
    one_node: bool
    held_by: JobFacts | None = None  # the job ahead that waits for these slots


def schedule(snapshot: Snapshot, now: datetime) -> Iterator[Command]:
    """Which queued jobs start, and why each of the others waits."""
    if snapshot.draining:
        return
    queue = queue_order(job for job in snapshot.jobs if job.status is Status.QUEUED)
    if snapshot.cluster is None:
        yield from _changed(queue, "cluster_unavailable", {"message": snapshot.cluster_error})
        return
    pools = _pools(snapshot, snapshot.cluster)
    used = sum(len(attempt.ranks) for attempt in snapshot.attempts)
    for job in queue:
        pool = _pool_for(job, pools)
        reason, data = _obstacle(job, pool, used, snapshot.policy.quota_slots, now)
        if reason is not None:
            yield from _changed([job], reason, data)
            continue
        pool.free -= job.ranks
        used += job.ranks
        yield Start(job.id, pool.device, pool.slot_memory_bytes, pool.one_node)


def queue_order(jobs: Iterable[JobFacts]) -> list[JobFacts]:
    """Higher priority first, then the earlier submit; back-off changes nothing."""
    return sorted(jobs, key=lambda job: (-job.priority, job.queued_at, job.id))


def _obstacle(job: JobFacts, pool: Pool, used: int, quota: int, now: datetime) -> tuple[str | None, Data]:
    facts: Data = {"ranks": job.ranks, "device": pool.device, "free": pool.free, "total": pool.total}
    if job.ranks > pool.total:
        return "no_capacity", {"ranks": job.ranks, "device": pool.device, "total": pool.total}
    if quota and job.ranks > quota:
        return "quota", {"ranks": job.ranks, "quota": quota, "used": used}
    if job.not_before is not None and now < job.not_before:
        return "backoff", {"until": job.not_before.strftime("%H:%M:%S UTC"), "message": _why_again(job)}
    if job.needs_plan:
        return "being_planned", {}
    if pool.held_by is not None:
        return "reserved", {"ranks": job.ranks, "device": pool.device}  # nothing that changes while it waits
    if quota and used + job.ranks > quota:
        pool.held_by = job
        return "quota", {"ranks": job.ranks, "quota": quota, "used": used}
    if job.ranks > pool.free:
        pool.held_by = job
        return "waiting_for_slots", facts
    return None, {}


def _why_again(job: JobFacts) -> object:
    """What the last attempt ended with, kept through the wait."""
    return job.reason_data.get("message") or sentence(job.reason or "retrying", job.reason_data)


def _changed(jobs: Iterable[JobFacts], reason: str, data: Data) -> Iterator[Explain]:
    for job in jobs:
        if job.reason != reason or job.reason_data != data:
            yield Explain(job.id, job.status, reason, data)


def _pools(snapshot: Snapshot, cluster: ClusterState) -> dict[str, Pool]:
    """Free slots by both books, the cluster's and ours: whichever is lower."""
    pools = {}
    for device in ("cuda", "cpu"):
        nodes = [node for node in cluster.nodes if node.alive and node.device == device]
        total = sum(node.slots for node in nodes)
        free = max(min(_free(nodes), total - _held(snapshot, device)), 0)
        memory = min((node.device_memory_bytes for node in nodes), default=0) or None
        pools[device] = Pool(device, total, free, memory, len(nodes) <= 1)
    return pools


def _free(nodes: Iterable[Node]) -> int:
    return sum(node.free_slots for node in nodes)


def _held(snapshot: Snapshot, device: str) -> int:
    live = [a for a in snapshot.attempts if a.status is not AttemptStatus.RELEASED and a.device == device]
    return sum(len(attempt.ranks) for attempt in live)


def _pool_for(job: JobFacts, pools: dict[str, Pool]) -> Pool:
    if job.device in pools:
        return pools[job.device]
    return pools["cuda"] if pools["cuda"].total >= job.ranks else pools["cpu"]
