"""A service without sockets: database, controller and fake cluster under one clock that only the test moves."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from server.controller.cluster import Node
from server.controller.fake_cluster import FakeCluster, cpu_node
from server.controller.fake_ranks import Fault, Gang
from server.controller.reconciler import Reconciler
from server.db import Database
from server.errors import ApiError
from server.ids import new_id
from server.rows import actions, attempts, checkpoints, events, jobs, new_jobs, reports
from server.rows.users import Principal
from server.settings import Settings
from server.states import Action, Status
from server.views import EventView
from workers.contract import AttemptId, ReportBatch, ResumeRequest
from workers.spec import JobSpec
from zero_engine.store import LocalStore

ADA = Principal("ada", "admin")
PATIENCE = 600  # looks


@dataclass
class Clock:
    """The only time there is."""

    now: datetime = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@dataclass
class World:
    """Everything, and what a person does to it. One `look` is one tick of the controller and one move of the ranks."""

    folder: Path
    database: Database
    clock: Clock
    settings: Settings
    cluster: FakeCluster
    controller: Reconciler
    server_away: bool = False  # reports are not answered
    drop_answers: int = 0  # so many batches are applied and their answers lost
    batches: list[ReportBatch] = field(default_factory=list)

    @classmethod
    async def build(cls, folder: Path, url: str, nodes: tuple[Node, ...], **settings: Any) -> World:
        clock = Clock()
        chosen = Settings(data_dir=folder, database_url=url, **{"scrub_bytes_per_second": 0, **settings})
        database = Database.open(chosen.database, clock=clock)
        loop = asyncio.get_running_loop()

        def send(url: str, token: str, batch: ReportBatch) -> int:
            return asyncio.run_coroutine_threadsafe(world.receive(batch), loop).result()

        cluster = FakeCluster(nodes, send, clock=clock)
        world = cls(folder, database, clock, chosen, cluster, new_controller(database, cluster, chosen, clock))
        return world

    async def receive(self, batch: ReportBatch) -> int:
        """The reports route without HTTP."""
        if self.server_away:
            raise OSError("away")
        try:
            applied = await self.database.transact(lambda tx: reports.apply(tx, batch, 2**20))
        except ApiError as error:
            raise OSError(str(error)) from error
        self.batches.append(batch)
        if self.drop_answers:
            self.drop_answers -= 1
            raise OSError("the answer was lost")
        return applied.seq

    def restart(self, **settings: Any) -> None:
        """kill -9 of the server and a new one: the controller forgets everything it had in memory."""
        self.settings = replace(self.settings, **settings)
        self.controller = new_controller(self.database, self.cluster, self.settings, self.clock)

    # --- a person

    async def submit(self, name: str = "job", ranks: int = 2, steps: int = 30, **parts: Any) -> str:
        """A queued job; `parts` are further sections of the spec."""
        spec = JobSpec.model_validate(
            {
                "name": name,
                "model": {"kind": "mlp", "hidden": [8]},
                "data": {"kind": "digits"},
                "train": {"steps": steps, "global_batch": 16, "micro_batch": 1},
                "resources": {"ranks": ranks},
                "checkpoint": {"every": 10},
                **parts,
            }
        )
        job_id = new_id()
        async with self.database.write() as tx:
            await new_jobs.create(tx, new_jobs.NewJob(job_id, ADA.name, spec, "", None, None))
        return job_id

    async def act(self, action: Action, job_id: str) -> bool:
        """What the button does; False when it is refused."""

        async def work(tx: Any) -> bool:
            job = await jobs.lock(tx, job_id)
            assert job is not None
            if action is Action.RESUME:
                await actions.resume(tx, job, ADA, ResumeRequest(), 64)
            else:
                await actions.act(tx, action, job, ADA)
            return True

        try:
            return await self.database.transact(work)
        except ApiError:
            return False

    # --- time

    async def look(self, times: int = 1, seconds: float = 0.1) -> None:
        """Let the controller look and the ranks move."""
        for _ in range(times):
            await self.controller.tick()
            await self.controller.settle()
            await asyncio.to_thread(self.cluster.advance)
            self.clock.pass_seconds(seconds)

    async def until(self, condition: Callable[[], Awaitable[bool]], seconds: float = 0.1) -> None:
        """Look until it holds."""
        for _ in range(PATIENCE):
            if await condition():
                return
            await self.look(seconds=seconds)
        raise AssertionError(f"it never came true; {await self.describe()}")

    async def until_status(self, job_id: str, *statuses: Status, seconds: float = 0.1) -> jobs.JobRecord:
        """Look until the job is in one of `statuses`."""

        async def reached() -> bool:
            return (await self.job(job_id)).status in statuses

        await self.until(reached, seconds)
        return await self.job(job_id)

    async def until_step(self, job_id: str, step: int) -> None:
        """Look until the job has reported a step."""

        async def reached() -> bool:
            return (await self.job(job_id)).step >= step

        await self.until(reached)

    # --- what is there

    async def job(self, job_id: str) -> jobs.JobRecord:
        async with self.database.read() as connection:
            found = await jobs.get(connection, job_id)
        assert found is not None, job_id
        return found

    async def attempt(self, job_id: str) -> attempts.AttemptRecord:
        """The newest one."""
        async with self.database.read() as connection:
            found = await attempts.newest(connection, job_id)
        assert found is not None, job_id
        return found

    async def gang(self, job_id: str) -> Gang:
        """The simulated ranks of the newest attempt."""
        return self.cluster.gang(AttemptId((await self.attempt(job_id)).id))

    async def events(self, job_id: str) -> list[EventView]:
        """Oldest first."""
        async with self.database.read() as connection:
            return (await events.page(connection, job_id, before=None, after=0, limit=500))[0]

    async def pause_after(self, job_id: str, step: int) -> None:
        """Pause a job that has reported a step, and look until it rests."""
        await self.until_step(job_id, step)
        await self.act(Action.PAUSE, job_id)
        await self.until_status(job_id, Status.PAUSED)

    async def actions(self, job_id: str) -> list[str]:
        """Names of its events."""
        return [event.action for event in await self.events(job_id)]

    async def checkpoints(self, job_id: str) -> list[checkpoints.CheckpointRef]:
        """Those that exist, newest step first."""
        async with self.database.read() as connection:
            return await checkpoints.of_job(connection, job_id)

    def free_slots(self) -> int:
        return sum(node.free_slots for node in self.cluster.observe().nodes)

    async def describe(self) -> str:
        async with self.database.read() as connection:
            rows = await jobs.in_status(connection, list(Status))
        return "; ".join(f"{j.name}: {j.status} {j.reason} {j.reason_data} step {j.step}" for j in rows)


def new_controller(database: Database, cluster: FakeCluster, settings: Settings, clock: Clock) -> Reconciler:
    """As `serve` builds it."""
    return Reconciler(
        database,
        cluster,
        settings,
        holder="controller",
        report_url="http://server/v1/reports",
        open_store=LocalStore,
        clock=clock,
    )


BOTH = ("sqlite", "postgresql")


def in_world(
    slots: int = 4, databases: tuple[str, ...] = ("sqlite",), **settings: Any
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """A test that is an `async def` with a World (and monkeypatch, if it asks), on each of `databases`."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def run(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
            given = {"monkeypatch": monkeypatch} if "monkeypatch" in inspect.signature(test).parameters else {}

            async def live() -> None:
                world = await World.build(tmp_path, database_url, (cpu_node("node", slots),), **settings)
                try:
                    await test(world, **given)
                finally:
                    await world.database.close()

            asyncio.run(live())

        functools.update_wrapper(run, test)
        run.__signature__ = inspect.signature(run, follow_wrapped=False)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("database_url", databases, indirect=True)(run)

    return decorate


__all__ = ["ADA", "BOTH", "Clock", "Fault", "World", "in_world"]
