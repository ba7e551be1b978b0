"""Apply one command: one effect on the cluster outside any session, then one guarded transaction.

Every method may be killed between its effect and its transaction and called again: effects are idempotent by attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sqlalchemy import select

from server.controller import actions, loading
from server.controller.cluster import Cluster
from server.controller.launcher import Launcher
from server.controller.leader import Leadership
from server.controller.snapshot import JobFacts, Policy
from server.controller.storekeeper import Storekeeper
from server.controller.supervision import finish
from server.db import Tx
from server.models import Attempt
from server.reasons import sentence
from server.rows import attempts, events, jobs
from server.states import AttemptStatus, Desired, Status
from workers.contract import AttemptId
from zero_engine.store import StoreError

log = logging.getLogger("shardyard.controller")
EXPLAINED_AT_ONCE = 200
NOT_RELEASED = frozenset(AttemptStatus) - {AttemptStatus.RELEASED}


@dataclass
class Running:
    """What this process has begun and not yet seen end."""

    launching: dict[AttemptId, asyncio.Task[None]] = field(default_factory=dict)
    deleting: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    adopted: set[AttemptId] = field(default_factory=set)  # told where this server listens


class Applier:
    """The hands of the controller."""

    def __init__(
        self,
        cluster: Cluster,
        leadership: Leadership,
        launcher: Launcher,
        storekeeper: Storekeeper,
        *,
        policy: Policy,
        report_url: str,
        wake: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self.leadership = leadership
        self._launcher = launcher
        self._storekeeper = storekeeper
        self._policy = policy
        self._report_url = report_url
        self.wake = wake
        self.running = Running()

    async def apply(self, commands: Sequence[actions.Command]) -> None:
        """Do them one after the other. Raises what the first failing one raised; while still wanted, it comes again."""
        await self._explain([c for c in commands if isinstance(c, actions.Explain)])
        for command in commands:
            await self._apply(command)

    async def _apply(self, command: actions.Command) -> None:
        match command:
            case actions.Adopt():
                await self._adopt(command)
            case actions.MarkRunning():
                await self._mark_running(command)
            case actions.MarkStopping():
                await self._mark_stopping(command)
            case actions.Stop():
                await self._stop(command)
            case actions.Decide():
                await self._decide(command)
            case actions.Kill():
                await self._kill(command)
            case actions.Finish():
                await self._finish(command)
            case actions.Sweep():
                await self._sweep(command)
            case actions.Start():
                await self._start(command)
            case actions.Explain():
                return  # written with its like
            case actions.Delete():
                self._delete(command)

    async def _adopt(self, command: actions.Adopt) -> None:
        await asyncio.to_thread(self._cluster.adopt, command.attempt_id, self._report_url)
        async with self.leadership.write() as tx:
            attempt = await attempts.get(tx.connection, command.attempt_id)
            assert attempt is not None, command.attempt_id
            if attempt.launched_at is None:
                await attempts.set_values(tx, attempt.id, launched_at=tx.now)
            await self._event(tx, attempt, "attempt.adopted", f"Attempt {attempt.number} goes on under this server.")
        self.running.adopted.add(command.attempt_id)

    async def _mark_running(self, command: actions.MarkRunning) -> None:
        async with self.leadership.write() as tx:
            attempt = await attempts.get(tx.connection, command.attempt_id)
            if attempt is None:
                return
            moved = await jobs.transition(
                tx, command.job_id, Status.RUNNING, actor="controller", reason="running", attempt=attempt.number
            )
            if moved is not None:
                starting = {AttemptStatus.STARTING}
                await attempts.transition(tx, attempt.id, AttemptStatus.RUNNING, allowed=starting, started_at=tx.now)

    async def _mark_stopping(self, command: actions.MarkStopping) -> None:
        async with self.leadership.write() as tx:
            job = await jobs.lock(tx, command.job_id)
            if job is not None and job.desired is not Desired.RUN:
                reason, data = job.reason or "cancelled_by_user", job.reason_data
                await jobs.transition(tx, job.id, Status.STOPPING, actor="controller", reason=reason, data=data)

    async def _stop(self, command: actions.Stop) -> None:
        await asyncio.to_thread(self._cluster.request_stop, command.attempt_id)
        async with self.leadership.write() as tx:
            attempt = await attempts.get(tx.connection, command.attempt_id)
            assert attempt is not None, command.attempt_id
            living = NOT_RELEASED
            await attempts.transition(tx, attempt.id, AttemptStatus.STOPPING, allowed=living, stop_at=tx.now)
            await self._event(tx, attempt, "attempt.stop_sent", "The ranks were asked to save and leave.")

    async def _decide(self, command: actions.Decide) -> None:
        async with self.leadership.write() as tx:
            attempt = await attempts.get(tx.connection, command.attempt_id)
            if attempt is None or attempt.reason is not None:
                return
            data = {**command.data, **await _planned(tx, attempt.id, command)}
            await attempts.transition(
                tx,
                attempt.id,
                AttemptStatus.STOPPING,
                allowed=NOT_RELEASED,
                reason=command.reason,
                reason_data=data,
                error=command.error,
                ended_at=tx.now,
            )
            message = sentence(command.reason, data)
            await self._event(tx, attempt, "attempt.ended", message, {"reason": command.reason, **data})

    async def _kill(self, command: actions.Kill) -> None:
        await asyncio.to_thread(self._cluster.kill, command.attempt_id)
        async with self.leadership.write() as tx:
            attempt = await attempts.get(tx.connection, command.attempt_id)
            assert attempt is not None, command.attempt_id
            await attempts.set_values(tx, attempt.id, kill_at=tx.now)
            if attempt.kill_at is None:
                await self._event(tx, attempt, "attempt.kill_sent", "Its processes were killed.")

    async def _finish(self, command: actions.Finish) -> None:
        if not await asyncio.to_thread(self._release, command.attempt_id):
            log.warning("attempt.not_released attempt=%s", command.attempt_id)
            return
        await self._storekeeper.take_in_spools(command.attempt_id)
        try:
            await self._storekeeper.index(command.job_id)
        except StoreError as error:  # the next launch looks again, and waits for the store
            log.warning("checkpoint.index_failed job=%s error=%s", command.job_id, error)
        async with self.leadership.write() as tx:
            job = await jobs.lock(tx, command.job_id)
            attempt = await attempts.get(tx.connection, command.attempt_id)
            assert job is not None and attempt is not None, command
            released = AttemptStatus.RELEASED
            if not await attempts.transition(tx, attempt.id, released, allowed=NOT_RELEASED, released_at=tx.now):
                return
            await self._event(tx, attempt, "attempt.released", "Nothing of it is left on the cluster.")
            await self._move(tx, await loading.job_facts(tx.connection, job), attempt)
        await self._tidy(command.job_id, attempt.number)
        await self._storekeeper.drop_spools(command.attempt_id)

    async def _tidy(self, job_id: str, ended_fence: int) -> None:
        """Nothing writes into the job's store any more: what its saves left unfinished is removed."""
        try:
            await self._storekeeper.tidy(job_id, ended_fence + 1)
        except StoreError as error:  # the release of the next attempt looks again
            log.warning("checkpoint.sweep_failed job=%s error=%s", job_id, error)

    def _release(self, attempt_id: AttemptId) -> bool:
        """Release and see it gone."""
        self._cluster.release(attempt_id)
        return all(a.attempt_id != attempt_id for a in self._cluster.observe().attempts)

    async def _move(self, tx: Tx, job: JobFacts, attempt: attempts.AttemptRecord) -> None:
        """Decided again inside the transaction: a person may have asked for something since the plan was made."""
        facts = loading.attempt_facts(attempt, (), frozenset())
        end = finish(job, facts, self._policy, tx.now)
        row = await jobs.lock(tx, job.id)
        assert row is not None, job.id
        values: dict[str, object] = {
            "user_failures": end.user_failures,
            "infrastructure_failures": end.infrastructure_failures,
            "progress_step": end.progress_step,
            "not_before": end.not_before,
        }
        if end.status is Status.FAILED:
            values["error"] = await _error(tx, attempt.id)
        moved = await jobs.transition(
            tx,
            job.id,
            end.status,
            actor="controller",
            reason=end.reason,
            data=end.data,
            attempt=attempt.number,
            values=values,
        )
        if moved is None:  # a fault of ours must not keep a job live for ever
            log.error("job.requeue_failed job=%s old=%s new=%s", job.id, row.status, end.status)
            await self._fail_move(tx, job, attempt, f"{row.status} does not lead to {end.status}")

    async def _fail_move(self, tx: Tx, job: JobFacts, attempt: attempts.AttemptRecord, why: str) -> None:
        await jobs.transition(
            tx,
            job.id,
            Status.FAILED,
            actor="controller",
            reason="requeue_failed",
            data={"message": why},
            attempt=attempt.number,
        )

    async def _sweep(self, command: actions.Sweep) -> None:
        await asyncio.to_thread(self._kill_and_release, command.attempt_id)
        async with self.leadership.write() as tx:
            known = await jobs.get(tx.connection, command.job_id)
            message = f"Attempt {command.attempt_id} was on the cluster and not in the database; it was removed."
            await events.append(tx, known.id if known else None, "attempt.swept", message, actor="controller")
        log.warning("attempt.swept attempt=%s job=%s", command.attempt_id, command.job_id)

    def _kill_and_release(self, attempt_id: AttemptId) -> None:
        self._cluster.kill(attempt_id)
        self._cluster.release(attempt_id)

    async def _start(self, command: actions.Start) -> None:
        launch = await self._launcher.claim(command, self._report_url)
        if launch is None:
            return
        self.running.adopted.add(launch.attempt_id)
        task = asyncio.create_task(self._launcher.launch(launch))
        self.running.launching[launch.attempt_id] = task
        task.add_done_callback(lambda done: self._launched(launch.attempt_id, done))

    def _launched(self, attempt_id: AttemptId, task: asyncio.Task[None]) -> None:
        del self.running.launching[attempt_id]
        if not task.cancelled() and task.exception() is not None:
            log.error("attempt.launch_unwritten attempt=%s error=%r", attempt_id, task.exception())
        self.wake()

    async def _explain(self, commands: Sequence[actions.Explain]) -> None:
        """Write the reasons of many jobs, a few hundred in one transaction."""
        for start in range(0, len(commands), EXPLAINED_AT_ONCE):
            async with self.leadership.write() as tx:
                for command in commands[start : start + EXPLAINED_AT_ONCE]:
                    waiting = command.status is Status.QUEUED
                    await (self._explain_waiting(tx, command) if waiting else self._explain_live(tx, command))

    async def _explain_live(self, tx: Tx, command: actions.Explain) -> None:
        job = await jobs.lock(tx, command.job_id)
        if job is None or job.status is not command.status or job.desired is not Desired.RUN:
            return
        await jobs.set_values(tx, job.id, reason=command.reason, reason_data=command.data)
        message = sentence(command.reason, command.data)
        await events.append(tx, job.id, f"job.{command.reason}", message, actor="controller", data=command.data)

    async def _explain_waiting(self, tx: Tx, command: actions.Explain) -> None:
        before = await jobs.get(tx.connection, command.job_id)
        written = await jobs.set_waiting_reason(tx, command.job_id, command.reason, command.data)
        if written and before is not None and before.reason != command.reason:
            message = sentence(command.reason, command.data)
            data = {"reason": command.reason, **command.data}
            await events.append(tx, command.job_id, "job.waiting", message, actor="controller", data=data)

    def _delete(self, command: actions.Delete) -> None:
        if command.job_id in self.running.deleting:
            return
        task = asyncio.create_task(self._storekeeper.delete_job(command.job_id))
        self.running.deleting[command.job_id] = task
        task.add_done_callback(lambda done: self.running.deleting.pop(command.job_id, None))

    async def _event(
        self,
        tx: Tx,
        attempt: attempts.AttemptRecord,
        action: str,
        message: str,
        data: dict[str, object] | None = None,
    ) -> None:
        await events.append(
            tx, attempt.job_id, action, message, actor="controller", attempt=attempt.number, data=data or {}
        )


async def _planned(tx: Tx, attempt_id: str, command: actions.Decide) -> dict[str, object]:
    """The plan's bytes of a rank that ran out of memory, to stand beside its peak."""
    if command.reason != "out_of_memory":
        return {}
    plan = (await tx.execute(select(Attempt.plan_memory).where(Attempt.id == attempt_id))).scalar_one()
    rank = command.data.get("rank")
    return {"planned_bytes": sum(plan[rank].values())} if plan and isinstance(rank, int) else {}


async def _error(tx: Tx, attempt_id: str) -> object:
    return (await tx.execute(select(Attempt.error).where(Attempt.id == attempt_id))).scalar_one()
