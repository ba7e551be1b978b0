"""Start one attempt: choose where it resumes, write it down, then ask the cluster.

Written down first, so that a controller that dies at any point leaves something that the next one can find: an attempt
that the cluster does not have is released and the job starts again, one that it has is adopted.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, cast

from server.controller.actions import Start
from server.controller.cluster import Cluster, ClusterUnavailable, Launch, NoCapacity
from server.controller.leader import Leadership
from server.controller.stage import resolve_stage
from server.controller.storekeeper import Storekeeper
from server.db import Database, Tx
from server.ids import new_id
from server.preflight import passed_over
from server.rows import attempts, checkpoints, events, jobs, plans
from server.settings import Settings
from server.states import Status
from workers.contract import AttemptId, JobId, LaunchOrder, Rank, ResumeFrom
from workers.spec import JobSpec
from zero_engine.store import StoreError

log = logging.getLogger("shardyard.launcher")
Device = Literal["cpu", "cuda"]
STORE_PAUSE = timedelta(seconds=5)  # before the next try, when the store did not answer
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Refused:
    """The job cannot run: a reason code with its data."""

    reason: str
    data: dict[str, object]


@dataclass(frozen=True)
class Prepared:
    """An attempt that is about to be written down and launched."""

    job: jobs.JobRecord
    spec: JobSpec  # stage is a number
    device: Device
    point: checkpoints.CheckpointRef | None
    passed: tuple[checkpoints.CheckpointRef, ...] = ()  # damaged ones that are newer than the point


class Launcher:
    """Turns a queued job into a launch."""

    def __init__(
        self,
        database: Database,
        cluster: Cluster,
        settings: Settings,
        leadership: Leadership,
        storekeeper: Storekeeper,
    ) -> None:
        self._database = database
        self._cluster = cluster
        self._settings = settings
        self._leadership = leadership
        self._storekeeper = storekeeper
        self._claiming = asyncio.Lock()  # held while an attempt is written down
        self._closed = False
        self.new_token: Callable[[], str] = lambda: secrets.token_urlsafe(32)

    async def claim(self, start: Start, report_url: str) -> Launch | None:
        """Write the next attempt of a queued job down. None: the job moved meanwhile, waits, or was failed, or the
        server stops.
        """
        if self._closed:
            return None
        try:
            prepared = await self._prepare(start)
        except StoreError as error:  # nothing is known of its checkpoints: the next look tries again
            await self._wait_for_store(start.job_id, error)
            return None
        if prepared is None:
            return None
        if isinstance(prepared, Refused):
            await self._fail(start.job_id, prepared)
            return None
        launch = self._launch(prepared, report_url)
        async with self._claiming:
            return launch if not self._closed and await self._write_down(prepared, launch) else None

    async def close(self) -> None:
        """Claim nothing any more. Returns when what was being written down is."""
        self._closed = True
        async with self._claiming:
            return

    async def launch(self, launch: Launch) -> None:
        """Ask the cluster, and write down what came of it. An answer that got lost is found by looking, not here."""
        card = asyncio.create_task(self._storekeeper.describe(launch.job_id))
        try:
            await self._ask(launch)
        finally:
            await self._written(launch, card)

    async def _written(self, launch: Launch, card: asyncio.Task[None]) -> None:
        """A store that is away now gets the card with the next launch; the ranks wait for it with their first save."""
        try:
            await card
        except StoreError as error:
            log.warning("job.card_unwritten job=%s error=%s", launch.job_id, error)

    async def _ask(self, launch: Launch) -> None:
        try:
            await asyncio.to_thread(self._cluster.launch, launch)
        except NoCapacity as error:
            await self._decide(launch, "no_room", {"message": str(error)})
        except ClusterUnavailable as error:
            log.warning("attempt.launch_unanswered attempt=%s error=%s", launch.attempt_id, error)
        except Exception as error:  # whatever it is, it is a reason and never ends the controller
            log.exception("attempt.launch_failed attempt=%s", launch.attempt_id)
            await self._failed(launch, error)
        else:
            async with self._leadership.write() as tx:
                await attempts.set_values(tx, launch.attempt_id, launched_at=tx.now)

    async def _prepare(self, start: Start) -> Prepared | Refused | None:
        job_id = start.job_id
        async with self._database.read() as connection:
            job = await jobs.get(connection, job_id)
        if job is None or job.status is not Status.QUEUED:
            return None
        await self._storekeeper.settle()
        if job.attempt > 0:
            await self._storekeeper.index(job_id)
        point = await self._beginning(job_id)
        async with self._database.read() as connection:
            existing, planned = await checkpoints.of_job(connection, job_id), await plans.of_job(connection, job_id)
        if point is None and (existing or job.forked_from is not None):
            return Refused("checkpoint_unreadable", {"message": f"{_lost(existing)}; clone the job to start again."})
        try:
            made = planned.predicted if planned else None
            spec = await asyncio.to_thread(resolve_stage, job.job_spec(), start, made)
        except Exception as error:  # whatever keeps it from being planned keeps it from running
            return Refused("spec_invalid", {"message": str(error)})
        named = point is not None and point.id == job.resume_checkpoint
        passed = () if named else tuple(passed_over(existing, point))
        return Prepared(job, spec, cast(Device, start.device), point, passed)

    async def _beginning(self, job_id: JobId) -> checkpoints.CheckpointRef | None:
        """What it resumes from: of those that are in the store, since one that is gone is marked and passed over."""
        while True:
            async with self._database.read() as connection:
                point = await checkpoints.resume_point(connection, job_id)
            if point is None or await self._storekeeper.has(point):
                return point

    def _launch(self, prepared: Prepared, report_url: str) -> Launch:
        attempt_id = AttemptId(new_id())
        ranks = range(prepared.spec.resources.ranks)
        return Launch(
            job_id=JobId(prepared.job.id),
            attempt_id=attempt_id,
            fence=prepared.job.attempt + 1,
            orders=tuple(self._order(prepared, attempt_id, rank) for rank in ranks),
            report_url=report_url,
            report_token=self.new_token(),
            orphan_seconds=self._settings.orphan_seconds,
        )

    def _order(self, prepared: Prepared, attempt_id: AttemptId, rank: int) -> LaunchOrder:
        job, point = prepared.job, prepared.point
        return LaunchOrder(
            job_id=JobId(job.id),
            attempt_id=attempt_id,
            fence=job.attempt + 1,
            rank=Rank(rank),
            world_size=prepared.spec.resources.ranks,
            master_addr="",  # the cluster fills in where rank 0 listens
            master_port=0,
            device=prepared.device,
            spec=prepared.spec,
            chunk=job.chunk,
            rank_folder=str(self._settings.ranks_dir / attempt_id / str(rank)),
            cache_folder=str(self._settings.cache_dir),
            store_url=self._settings.job_store(job.id),
            resume=self._resume_from(job.id, point) if point else None,
        )

    def _resume_from(self, job_id: str, point: checkpoints.CheckpointRef) -> ResumeFrom:
        """A fork's first attempt reads from the store of the job that wrote the checkpoint."""
        elsewhere = None if point.job_id == job_id else self._settings.job_store(point.job_id)
        return ResumeFrom(checkpoint=point.folder, step=point.step, store_url=elsewhere)

    async def _write_down(self, prepared: Prepared, launch: Launch) -> bool:
        job, point, spec = prepared.job, prepared.point, prepared.spec
        stage = spec.zero.stage
        assert stage != "auto", "the stage is resolved before the launch"
        new = attempts.NewAttempt(
            id=launch.attempt_id,
            job_id=job.id,
            number=launch.fence,
            ranks=len(launch.orders),
            stage=stage,
            chunk=job.chunk,
            device=prepared.device,
            token_hash=hashlib.sha256(launch.report_token.encode()).hexdigest(),
            resume_step=point.step if point else None,
            resume_checkpoint=point.id if point else None,
        )
        async with self._leadership.write() as tx:
            current = await jobs.lock(tx, job.id)
            if current is None or current.status is not Status.QUEUED or current.version != job.version:
                return False
            if not await attempts.create(tx, new):
                return False
            data = {"ranks": len(launch.orders), "device": prepared.device}
            moved = await jobs.transition(
                tx, job.id, Status.STARTING, actor="controller", reason="starting", data=data, attempt=launch.fence
            )
            assert moved is Status.QUEUED, f"job {job.id} moved while it was locked"
            await self._tell_fallback(tx, prepared, launch.fence)
        return True

    async def _tell_fallback(self, tx: Tx, prepared: Prepared, attempt: int) -> None:
        """Why the attempt begins further back than its job has come."""
        if not prepared.passed:
            return
        step = prepared.point.step if prepared.point else 0
        why = "; ".join(f"that of step {each.step}: {each.problem or each.status}" for each in prepared.passed[:3])
        message = f"Attempt {attempt} begins at step {step}, since newer checkpoints are damaged: {why}"
        await events.append(
            tx, prepared.job.id, "resume.fallback", message, actor="controller", attempt=attempt, data={"step": step}
        )

    async def _wait_for_store(self, job_id: JobId, error: StoreError) -> None:
        """Back-off, so that it holds no slots meanwhile; the queue says why."""
        why = {"message": f"The checkpoint store does not answer: {error}"}
        async with self._leadership.write() as tx:
            job = await jobs.lock(tx, job_id)
            if job is not None and job.status is Status.QUEUED:
                if (job.reason_data or {}).get("message") != why["message"]:  # said once, however often it is tried
                    log.warning("attempt.store_away job=%s error=%s", job_id, error)
                await jobs.set_values(tx, job_id, not_before=tx.now + STORE_PAUSE, reason_data=why)

    async def _fail(self, job_id: JobId, refused: Refused) -> None:
        async with self._leadership.write() as tx:
            await jobs.transition(
                tx,
                job_id,
                Status.FAILED,
                actor="controller",
                reason=refused.reason,
                data=refused.data,
                allowed={Status.QUEUED},
            )

    async def _failed(self, launch: Launch, error: Exception) -> None:
        """The sentence gets the first and the last line, the page the whole text."""
        text = _ANSI.sub("", str(error)) or type(error).__name__
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        message = lines[0][:300] if len(lines) == 1 else f"{lines[0][:200]} … {lines[-1][:200]}"
        shown: dict[str, object] = {
            "rank": None,
            "type": type(error).__name__,
            "message": message,
            "traceback": text,
            "code": None,
        }
        await self._decide(launch, "launch_failed", {"message": message}, shown)

    async def _decide(
        self, launch: Launch, reason: str, data: dict[str, object], error: dict[str, object] | None = None
    ) -> None:
        async with self._leadership.write() as tx:
            values: dict[str, object] = {"reason": reason, "reason_data": data, "error": error, "ended_at": tx.now}
            await attempts.set_values(tx, launch.attempt_id, **values)


def _lost(existing: Sequence[checkpoints.CheckpointRef]) -> str:
    """Why there is nothing to begin from."""
    if not existing:
        return "the one it was forked from is damaged or gone"
    first = max(existing, key=lambda ref: (ref.attempt, ref.step))
    return f"none of {len(existing)} is left whole; that of step {first.step}: {first.problem or first.status}"
