"""The schema, step by step, through Alembic: `await migrate(url)` brings a database to the newest one.

Read `versions/` in order. A migration runs whole in one transaction on both databases, so that a server killed in the
middle of it leaves the old schema and the next start begins again. Must not import `server.routes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, text

from server.db import BUSY_SECONDS, async_url, prepare_sqlite

MIGRATION_LOCK = 0x53484D47  # advisory lock of PostgreSQL: one server migrates, the others wait


async def migrate(url: str, revision: str = "head") -> None:
    """Bring the database at `url` to `revision`; several servers may call it at the same time."""
    await asyncio.to_thread(upgrade, url, revision)


def upgrade(url: str, revision: str = "head") -> None:
    """Move up to `revision`."""
    _run(url, lambda config: command.upgrade(config, revision))


def downgrade(url: str, revision: str) -> None:
    """Move down to `revision`; `base` is an empty database."""
    _run(url, lambda config: command.downgrade(config, revision))


def current(url: str) -> str | None:
    """The revision of a database, or None."""
    engine = _engine(url)
    try:
        with engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    finally:
        engine.dispose()


def head() -> str | None:
    """The newest revision there is."""
    return ScriptDirectory.from_config(_config()).get_current_head()


def _run(url: str, what: Callable[[Config], None]) -> None:
    engine = _engine(url)
    try:
        with engine.begin() as connection:
            _lock(connection)
            config = _config()
            config.attributes["connection"] = connection
            what(config)
    finally:
        engine.dispose()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("path_separator", "os")
    return config


def _engine(url: str) -> Engine:
    parsed = async_url(url)
    if parsed.get_backend_name() == "sqlite":
        engine = create_engine(parsed.set(drivername="sqlite"), connect_args={"timeout": BUSY_SECONDS})
        prepare_sqlite(engine, "BEGIN IMMEDIATE")
        return engine
    return create_engine(parsed)


def _lock(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
