"""Random histories: whatever people, ranks, servers and the cluster do, in any order, the state table holds.

Run on SQLite and PostgreSQL. After each rule the invariants are checked; at the end the world calms down and every job
must come to rest with nothing left on the cluster.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from sqlalchemy import select

from server.controller.cluster import LaunchFailed, NoCapacity
from server.controller.fake_cluster import cpu_node
from server.models import Attempt, Event, Job
from server.states import LIVE, Action, AttemptStatus, Desired, Status, is_legal
from tests.service.controller_world import Fault, World

T = TypeVar("T")
SLOTS = 3
FEW, MANY = 2, 150  # histories
FAULTS = st.builds(
    Fault,
    kind=st.sampled_from(["raise", "die", "exit", "lose", "hang", "deaf", "silent"]),
    rank=st.integers(0, 1),
    step=st.integers(0, 12),
    phase=st.sampled_from([None, None, "started", "joining", "building"]),
)


class Histories(RuleBasedStateMachine):
    """One world and what happens to it. `make_url` is set per database by the test."""

    make_url: Callable[[], str]
    folder: Path
    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world: World = self.run(
            World.build(
                Path(tempfile.mkdtemp(dir=self.folder)),  # a server finds the jobs of the store it has
                type(self).make_url(),
                (cpu_node("node", SLOTS),),
                start_deadline_seconds=20.0,
                no_progress_seconds=20.0,
                sweep_seconds=5.0,
            )
        )
        self.submitted = 0

    def run(self, work: Awaitable[T]) -> T:
        return self.loop.run_until_complete(work)

    @rule(target=jobs, ranks=st.integers(1, SLOTS + 1), steps=st.integers(1, 25), retries=st.integers(0, 3))
    def submit(self, ranks: int, steps: int, retries: int) -> str:
        self.submitted += 1
        parts: dict[str, Any] = {
            "restart": {"user_failures": retries // 2, "infrastructure_failures": retries},
            "checkpoint": {"every": 5},
            "stop_grace_seconds": 2.0,
        }
        return self.run(self.world.submit(f"j{self.submitted}", ranks, steps, **parts))

    @rule(job=jobs, action=st.sampled_from(list(Action)))
    def person(self, job: str, action: Action) -> None:
        if self.run(self._exists(job)):
            self.run(self.world.act(action, job))

    @rule(times=st.integers(1, 8), seconds=st.sampled_from([0.1, 1.0, 4.0]))
    def look(self, times: int, seconds: float) -> None:
        self.run(self.world.look(times, seconds))

    @rule()
    def ranks_move_unseen(self) -> None:
        self.run(asyncio.to_thread(self.world.cluster.advance))

    @rule(fault=FAULTS)
    def script(self, fault: Fault) -> None:
        self.world.cluster.faults = [fault]

    @rule()
    def kill_the_server(self) -> None:
        self.world.restart()

    @rule(away=st.booleans())
    def reports(self, away: bool) -> None:
        self.world.server_away = away

    @rule(down=st.booleans())
    def cluster(self, down: bool) -> None:
        self.world.cluster.down = down

    @rule(what=st.sampled_from(["answer", "room", "launch", "everything"]))
    def bad_luck(self, what: str) -> None:
        cluster = self.world.cluster
        match what:
            case "answer":
                cluster.lose_next_answer = True
            case "room":
                cluster.refuse_next = NoCapacity("gone")
            case "launch":
                cluster.refuse_next = LaunchFailed("broken")
            case "everything":
                cluster.lose_everything()

    async def _exists(self, job: str) -> bool:
        async with self.world.database.read() as connection:
            return (await connection.execute(select(Job.id).where(Job.id == job))).first() is not None

    async def _rows(self) -> tuple[Any, Any, Any]:
        async with self.world.database.read() as connection:
            jobs = (await connection.execute(select(Job.__table__))).all()
            attempts = (await connection.execute(select(Attempt.__table__))).all()
            events = (await connection.execute(select(Event.__table__).order_by(Event.id))).all()
        return jobs, attempts, events

    @invariant()
    def the_table_holds(self) -> None:
        """Legal edges only, one unreleased attempt per live job and none otherwise, no slot given out twice."""
        jobs, attempts, events = self.run(self._rows())
        for job in jobs:
            history = [(e.old, e.new) for e in events if e.job_id == job.id and e.new is not None and e.old != e.new]
            for old, new in history[1:]:
                assert is_legal(Status(old), Status(new)), (job.name, old, new)
            assert [old for old, _ in history[1:]] == [new for _, new in history[:-1]], "an edge without its event"
            assert history[-1][1] == job.status
            open_attempts = [a for a in attempts if a.job_id == job.id and a.status != AttemptStatus.RELEASED]
            assert len(open_attempts) == (1 if job.status in LIVE else 0), (job.name, job.status)
            if job.status == Status.PAUSED:
                assert job.desired == Desired.PAUSE
            if job.status in (Status.STARTING, Status.RUNNING):
                assert job.desired == Desired.RUN
        used = sum(len(self.world.cluster.gang(a).ranks) for a in self.world.cluster.attempts)
        assert used <= SLOTS

    def teardown(self) -> None:
        try:
            self.run(self._calm())
        finally:
            self.run(self.world.database.close())
            self.loop.close()

    async def _calm(self) -> None:
        """Everything is repaired; what waits for a person or for slots that do not exist may; the rest must end."""
        world = self.world
        world.cluster.down, world.server_away, world.cluster.refuse_next = False, False, None
        world.cluster.lose_next_answer, world.cluster.faults = False, []

        async def at_rest() -> bool:
            jobs, _, _ = await self._rows()
            moving = [j for j in jobs if j.status in LIVE or j.status == Status.DELETING]
            moving += [j for j in jobs if j.status == Status.QUEUED and j.ranks <= SLOTS]
            return not moving and not world.cluster.attempts

        await world.until(at_rest, seconds=1.0)
        assert world.free_slots() == SLOTS


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Makes the URL of an empty database, as often as it is called."""
    numbers = iter(range(10**6))

    def of_file() -> str:
        path = tmp_path / f"{next(numbers)}.db"
        path.write_bytes(request.getfixturevalue("sqlite_template").read_bytes())
        return f"sqlite:///{path}"

    def of_server() -> str:
        server, name = request.getfixturevalue("postgres"), f"h{os.getpid()}_{next(numbers)}"
        server.psql(f"CREATE DATABASE {name} TEMPLATE template")
        return str(server.get_uri(name))

    return of_file if request.param == "sqlite" else of_server


def live_through(new_url: Callable[[], str], folder: Path, histories: int, same_every_time: bool) -> None:
    """Every history starts from an empty database of its own."""
    machine = type("Machine", (Histories,), {"make_url": staticmethod(new_url), "folder": folder})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=histories,
            stateful_step_count=25,
            deadline=None,
            derandomize=same_every_time,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


def test_no_history_breaks_the_table_or_leaves_anything_behind(new_url: Callable[[], str], tmp_path: Path) -> None:
    """A few histories, the same every time."""
    live_through(new_url, tmp_path, FEW, same_every_time=True)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_random_histories_break_nothing_either(new_url: Callable[[], str], tmp_path: Path) -> None:
    """Others every time; a failure prints how to repeat it."""
    live_through(new_url, tmp_path, MANY, same_every_time=False)
