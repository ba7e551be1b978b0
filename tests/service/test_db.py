"""The database: migrations, writers beside each other, the feed's order, ids, leases; on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from subprocess import PIPE, Popen, run
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, func, insert, inspect, select
from sqlalchemy.exc import DBAPIError

from server import migrations
from server.db import Database, Tx, async_url
from server.ids import is_id, new_id
from server.models import Base, Event, Job, Lease
from server.rows import feed, jobs, leases, new_jobs
from server.rows.new_jobs import NewJob
from server.states import EDGES, PREVIOUS, Desired, Status
from tests.service.conftest import SPEC
from workers.spec import parse_spec


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without any schema."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
        return
    server = request.getfixturevalue("postgres")
    server.psql("CREATE DATABASE empty")
    yield server.get_uri("empty")
    server.psql("DROP DATABASE empty WITH (FORCE)")


def _sync(url: str) -> Any:
    parsed = async_url(url)
    return create_engine(parsed.set(drivername="sqlite") if parsed.get_backend_name() == "sqlite" else parsed)


async def _submit(database: Database, **spec: Any) -> str:
    job = NewJob(new_id(), "ada", parse_spec({**SPEC, **spec}), "", None, None)
    async with database.write() as tx:
        await new_jobs.create(tx, job)
    return job.id


# --- migrations


def test_up_down_up_leaves_the_schema_of_the_models(empty_url: str) -> None:
    """Every step back is real, and what the migrations build is what `server/models` says."""
    migrations.upgrade(empty_url)
    migrations.downgrade(empty_url, "base")
    engine = _sync(empty_url)
    assert set(inspect(engine).get_table_names()) <= {"alembic_version"}
    migrations.upgrade(empty_url)
    assert migrations.current(empty_url) == migrations.head()
    with engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), Base.metadata)
    engine.dispose()
    assert differences == []


def test_a_migration_that_is_cut_short_leaves_nothing_and_runs_again(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one transaction, DDL included, on both databases."""
    real = migrations.command.upgrade

    def cut_short(config: Any, revision: str) -> None:
        real(config, revision)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(migrations.command, "upgrade", cut_short)
        with pytest.raises(KeyboardInterrupt):
            migrations.upgrade(empty_url)
    engine = _sync(empty_url)
    assert inspect(engine).get_table_names() == []
    engine.dispose()
    migrations.upgrade(empty_url)
    assert migrations.current(empty_url) == migrations.head()


async def test_servers_that_migrate_at_the_same_time_wait_for_each_other(empty_url: str) -> None:
    """Two starts at once: one does it, the other finds it done."""
    await asyncio.gather(migrations.migrate(empty_url), migrations.migrate(empty_url))
    assert migrations.current(empty_url) == migrations.head()


# --- writers


def test_eight_writers_in_four_processes_never_find_the_database_locked(sqlite_template: Path, tmp_path: Path) -> None:
    """Each write begins with the write lock, so that waiting is all that can happen."""
    path = tmp_path / "busy.db"
    path.write_bytes(sqlite_template.read_bytes())
    command = [sys.executable, "-m", "tests.service.busy_writers", f"sqlite:///{path}", "2", "25"]
    writers = [Popen(command, stderr=PIPE, text=True) for _ in range(4)]
    assert [writer.communicate()[1] for writer in writers] == [""] * 4
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM events").fetchone() == (200,)


async def test_readers_go_on_while_a_writer_writes(database: Database) -> None:
    """A reader sees the last committed state, at once."""
    job_id = await _submit(database)
    async with database.write() as tx:
        await jobs.set_values(tx, job_id, priority=99)
        async with database.read() as connection:
            seen = await jobs.get(connection, job_id)
        assert seen is not None and seen.priority == 50


async def test_an_exception_takes_everything_back_and_tells_nobody(database: Database) -> None:
    """No row, no line of the feed, no call."""
    told: list[int] = []
    database.on_change = database.on_work = lambda: told.append(1)
    with pytest.raises(RuntimeError):
        async with database.write() as tx:
            await new_jobs.create(tx, NewJob(new_id(), "ada", parse_spec(SPEC), "", None, None))
            raise RuntimeError
    async with database.read() as connection:
        assert await connection.scalar(select(func.count()).select_from(Job)) == 0
        assert await feed.after(connection, 0) == []
    assert told == []


async def test_a_transaction_that_the_database_gave_up_is_tried_again(database: Database) -> None:
    """Twice a deadlock, then it works; the work was begun three times and is there once."""
    tries: list[int] = []

    class Deadlock(Exception):
        sqlstate = "40P01"

    async def work(tx: Tx) -> str:
        tries.append(1)
        await tx.execute(insert(Event).values(at=tx.now, action="x", actor="y", message="", data={}))
        if len(tries) < 3:
            raise DBAPIError("update", {}, Deadlock())
        return "done"

    assert await database.transact(work) == "done"
    async with database.read() as connection:
        assert (len(tries), await connection.scalar(select(func.count()).select_from(Event))) == (3, 1)


async def test_cancels_and_retries_of_many_jobs_at_once_all_end(database: Database) -> None:
    """The order of locks is the same everywhere: no deadlock reaches the caller."""
    ids = [await _submit(database, name=str(i)) for i in range(20)]

    async def move(job_id: str, status: Status) -> bool:
        async def work(tx: Tx) -> bool:
            return await jobs.transition(tx, job_id, status, actor="t", reason="submitted") is not None

        return await database.transact(work)

    moved = await asyncio.gather(*(move(i, s) for i in ids for s in (Status.CANCELLED, Status.STARTING)))
    async with database.read() as connection:
        states = [(await jobs.get(connection, i)) for i in ids]
    assert all(job is not None and job.status in (Status.CANCELLED, Status.STARTING) for job in states)
    assert sum(moved) == 20, "each job was moved once: the loser of each pair found no row"


# --- the guarded transition


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(moves=st.lists(st.sampled_from(list(Status)), max_size=12))
async def test_only_edges_of_the_table_are_walked_and_each_leaves_one_event(
    database: Database, moves: list[Status]
) -> None:
    """Any sequence of wishes: the status is where the table leads, and the events are the path."""
    job_id, here = await _submit(database), Status.QUEUED
    path = []
    for wish in moves:
        async with database.write() as tx:
            old = await jobs.transition(tx, job_id, wish, actor="t", reason="submitted")
        legal = here in PREVIOUS[wish]
        assert old == (here if legal else None)
        if legal:
            path.append((here, wish))
            here = wish
    async with database.read() as connection:
        job = await jobs.get(connection, job_id)
        moved = select(Event.old, Event.new).where(Event.job_id == job_id, Event.old.is_not(None))
        told = [tuple(row) for row in (await connection.execute(moved.order_by(Event.id))).all()]
    assert job is not None and job.status is here
    assert told == path


async def test_a_stale_fence_and_a_wrong_guard_move_nothing(database: Database) -> None:
    """Another attempt number, or a status that is not allowed: None, and the version stays."""
    job_id = await _submit(database)
    async with database.write() as tx:
        for given_ in ({"attempt": 3}, {"allowed": [Status.RUNNING]}):
            assert await jobs.transition(tx, job_id, Status.STARTING, actor="t", reason="submitted", **given_) is None
        job = await jobs.get(tx.connection, job_id)
        assert job is not None and job.version == 1
    assert len(EDGES) > 20 and Desired.RUN.severity == 0


async def test_the_database_itself_refuses_a_status_that_is_not_in_the_table(database: Database) -> None:
    """The CHECK constraint is derived from the states."""
    job_id = await _submit(database)
    with pytest.raises(DBAPIError):
        async with database.write() as tx:
            await tx.execute(Job.__table__.update().where(Job.id == job_id).values(status="sleeping"))


# --- the feed, ids, leases


async def test_every_change_has_a_greater_id_than_all_that_were_seen_before_it(database: Database) -> None:
    """A reader that always asks for what comes after its last id misses nothing, however many write."""
    seen: list[int] = []
    done = asyncio.Event()

    async def read() -> None:
        while True:
            finished = done.is_set()
            async with database.read() as connection:
                entries = await feed.after(connection, seen[-1] if seen else 0)
            seen.extend(entry.id for entry in entries)
            if finished:
                return
            await asyncio.sleep(0)

    async def write(number: int) -> None:
        for _ in range(15):
            async with database.write() as tx:
                tx.changed("metrics", f"{number}")

    reader = asyncio.create_task(read())
    await asyncio.gather(*(write(n) for n in range(6)))
    done.set()
    await reader
    assert len(seen) == 90 and seen == sorted(set(seen))


async def test_the_feed_keeps_a_bounded_tail(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruning takes the oldest; ids go on growing."""
    monkeypatch.setattr(feed, "KEPT", 3)
    for number in range(10):
        async with database.write() as tx:
            tx.changed("job", str(number))
    async with database.write() as tx:
        await feed.prune(tx)
    async with database.read() as connection:
        span = await feed.span(connection)
    assert span.newest - span.oldest == 2


def test_ids_grow_and_are_uuid7() -> None:
    """Sorted as made, also ten thousand within a moment; anything else is not one of ours."""
    made = [new_id() for _ in range(10_000)]
    assert made == sorted(set(made)) and all(map(is_id, made))
    for wrong in ("", made[0].upper(), made[0] + "\n", "../" + made[0], made[0].replace("-", ""), "0" * 36):
        assert not is_id(wrong)


async def test_one_holder_leads_and_the_next_gets_a_greater_epoch(database: Database) -> None:
    """While it is held nobody else gets it; expired, the next one's epoch fences the old one."""
    async with database.write() as tx:
        first = await leases.acquire(tx, "controller", "a", 10.0)
        assert first is not None and first.epoch == 1
        assert await leases.acquire(tx, "controller", "b", 10.0) is None
        again = await leases.acquire(tx, "controller", "a", 10.0)
        assert again is not None and again.epoch == 1
        await tx.execute(Lease.__table__.update().values(expires_at=tx.now - timedelta(seconds=1)))
        second = await leases.acquire(tx, "controller", "b", 10.0)
        assert second is not None and second.epoch == 2
        assert not await leases.check(tx, first) and await leases.check(tx, second)


# --- house


def test_importing_the_app_loads_neither_torch_nor_ray() -> None:
    """In a fresh interpreter."""
    code = "import sys, server.app, server.openapi; print([m for m in ('torch', 'ray') if m in sys.modules])"
    done = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_urls_of_other_databases_are_refused_by_name() -> None:
    """And a database in memory, which readers and writers cannot share."""
    for url in ("mysql://x/y", "oracle://x"):
        with pytest.raises(ValueError, match="use sqlite or postgresql"):
            Database.open(url)
    with pytest.raises(ValueError, match="use a file"):
        Database.open("sqlite://")


async def test_an_installation_has_one_name_for_ever(database: Database) -> None:
    """Every server of a database gets the same, at once and years later; no other server's lease is touched."""
    async with database.write() as tx:
        first = await leases.installation(tx)
    async with database.write() as tx:
        assert await leases.installation(tx) == first
        held = await leases.read(tx.connection, leases.INSTALLATION)
        assert held is not None and held.expires_at > tx.now + leases.FOR_EVER / 2
        assert await leases.acquire(tx, "controller", "a", 10.0) is not None
    assert len(first) == 12 and int(first, 16) >= 0
