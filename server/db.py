"""The one place that opens, begins and commits: `Database.read()` and `Database.write()`.

SQLite runs in WAL; a write begins with BEGIN IMMEDIATE and all writers of a process queue for one connection, so that
"database is locked" cannot come from ourselves. PostgreSQL goes through psycopg 3; `transact` tries a deadlock again.
A `Database` belongs to one event loop. Never await the network inside `read` or `write`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from sqlalchemy import Executable, MetaData, event, make_url, text
from sqlalchemy import insert as plain_insert
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, CursorResult, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase

from server.models import Change

log = logging.getLogger("shardyard.db")
T = TypeVar("T")
Clock = Callable[[], datetime]

BUSY_SECONDS = 60.0  # another process may hold SQLite's write lock for so long
RETRIES = 5  # of a transaction that the database gave up: deadlock or serialization failure
FEED_LOCK = 0x53484152  # advisory lock: on PostgreSQL feed ids must be given in commit order


def utc_now() -> datetime:
    """The wall clock, aware UTC."""
    return datetime.now(UTC)


def async_url(url: str) -> URL:
    """`url` with the async driver that we use. Raises ValueError for other databases."""
    parsed = make_url(url)
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
    backend = parsed.drivername.partition("+")[0]
    if backend not in drivers:
        raise ValueError(f"database {backend!r} is not supported; use sqlite or postgresql")
    return parsed.set(drivername=drivers[backend])


class Tx:
    """A write transaction: its connection, its time, and what it changed for those who watch."""

    def __init__(self, connection: AsyncConnection, now: datetime) -> None:
        self.connection = connection
        self.now = now  # one time for everything the transaction writes
        self._changes: dict[tuple[str, str | None], None] = {}
        self.has_work = False

    async def execute(self, statement: Executable, parameters: Any = None) -> CursorResult[Any]:
        """Run a Core statement."""
        return await self.connection.execute(statement, parameters)

    def insert(self, table: type[DeclarativeBase]) -> postgresql.Insert:
        """An INSERT that knows `on_conflict_do_update` and `on_conflict_do_nothing` on both databases."""
        if self.connection.dialect.name == "sqlite":
            return cast(postgresql.Insert, sqlite.insert(table))  # the same methods under another class
        return postgresql.insert(table)

    def changed(self, topic: str, job_id: str | None = None) -> None:
        """Tell the feed that something of `topic` changed; once per transaction and job."""
        self._changes[(topic, job_id)] = None

    def work(self) -> None:
        """There is something for the controller to look at, as soon as this is committed."""
        self.has_work = True

    async def write_changes(self) -> bool:
        """Append the collected changes to the feed, last of all statements. True if there were any."""
        if not self._changes:
            return False
        if self.connection.dialect.name == "postgresql":
            await self.connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": FEED_LOCK})
        rows = [{"topic": topic, "job_id": job_id, "at": self.now} for topic, job_id in self._changes]
        await self.connection.execute(plain_insert(Change), rows)
        return True


class Database:
    """Connections to one database. Make with `Database.open(url)`, end with `close()`."""

    def __init__(self, reader: AsyncEngine, writer: AsyncEngine, clock: Clock) -> None:
        self._reader = reader
        self._writer = writer
        self._clock = clock
        self.on_change: Callable[[], None] = lambda: None  # called after a commit that tells the feed something
        self.on_work: Callable[[], None] = lambda: None  # called after a commit that the controller should look at

    @classmethod
    def open(cls, url: str, clock: Clock = utc_now, pool_size: int = 8) -> Database:
        """Engines for `url`; nothing is connected yet. Raises ValueError for a database that we do not know."""
        parsed = async_url(url)
        if parsed.get_backend_name() == "sqlite":
            return cls(_sqlite(parsed, "BEGIN", pool_size), _sqlite(parsed, "BEGIN IMMEDIATE", 1), clock)
        engine = create_async_engine(parsed, pool_size=pool_size, max_overflow=pool_size, pool_pre_ping=True)
        return cls(engine, engine, clock)

    @property
    def dialect(self) -> str:
        """`sqlite` or `postgresql`."""
        return self._writer.dialect.name

    def now(self) -> datetime:
        """The time by this database's clock, aware UTC."""
        return self._clock()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A connection in a transaction that sees one state of the database and is rolled back."""
        async with self._reader.connect() as connection:
            yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[Tx]:
        """A transaction that is committed when the block ends without an exception, else rolled back."""
        async with self._writer.begin() as connection:
            tx = Tx(connection, self._clock())
            yield tx
            told = await tx.write_changes()
        if told:
            self.on_change()
        if tx.has_work:
            self.on_work()

    async def transact(self, work: Callable[[Tx], Awaitable[T]]) -> T:
        """`work` in a write transaction, again from its start when the database gave the transaction up."""
        for attempt in range(RETRIES):
            try:
                async with self.write() as tx:
                    return await work(tx)
            except DBAPIError as error:
                if attempt == RETRIES - 1 or not _is_transient(error):
                    raise
                log.warning("db.retry attempt=%d error=%s", attempt + 1, type(error.orig).__name__)
                await asyncio.sleep(0.02 * 2**attempt)
        raise AssertionError("unreachable")

    async def create_all(self, metadata: MetaData) -> None:
        """The newest schema at once, for tests; the service migrates instead."""
        async with self._writer.begin() as connection:
            await connection.run_sync(metadata.create_all)

    async def close(self) -> None:
        """Close every connection."""
        await self._reader.dispose()
        if self._writer is not self._reader:
            await self._writer.dispose()


def _is_transient(error: DBAPIError) -> bool:
    sqlstate = getattr(error.orig, "sqlstate", None)
    return sqlstate in ("40001", "40P01")  # serialization failure, deadlock


def _sqlite(url: URL, begin: str, pool_size: int) -> AsyncEngine:
    if url.database in (None, "", ":memory:"):
        raise ValueError("an in-memory SQLite database cannot be shared by readers and writers; use a file")
    engine = create_async_engine(
        url, pool_size=pool_size, max_overflow=0, pool_timeout=BUSY_SECONDS, connect_args={"timeout": BUSY_SECONDS}
    )
    prepare_sqlite(engine.sync_engine, begin)
    return engine


def prepare_sqlite(engine: Engine, begin: str) -> None:
    """WAL, foreign keys, full durability; transactions begin with `begin` and cover DDL too."""

    @event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # the driver must not begin or commit by itself
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "temp_store=MEMORY"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin_transaction(connection: Any) -> None:
        connection.exec_driver_sql(begin)
