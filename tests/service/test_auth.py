"""Who may do what: the whole table of routes by role, tokens, sessions, Host and Origin."""

from __future__ import annotations

import logging
import os
import stat
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from server.auth import COOKIE, RANKING, RedactTokens, Requires, check_owner, read_or_make_token
from server.errors import ApiError
from server.ids import new_id
from server.rows import users
from server.rows.users import Principal
from tests.service.conftest import ADMIN_TOKEN, Api

PUBLIC = {
    ("GET", "/login"),
    ("POST", "/v1/login"),
    ("POST", "/v1/logout"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
    ("POST", "/v1/reports"),  # has the attempt's own token
    ("GET", "/{path:path}"),
    ("HEAD", "/{path:path}"),
}


@pytest.fixture
def database_url(tmp_path: Path, sqlite_template: Path) -> str:
    """Access does not depend on the database: SQLite alone."""
    path = tmp_path / "auth.db"
    path.write_bytes(sqlite_template.read_bytes())
    return f"sqlite:///{path}"


def _routes(routes: list[Any]) -> list[APIRoute]:
    """Every route of the app, those of included routers too."""
    found: list[APIRoute] = []
    for route in routes:
        inner = getattr(route, "original_router", None)
        if isinstance(route, APIRoute):
            found.append(route)
        elif inner is not None:
            found += _routes(inner.routes)
    return found


def _needs(route: APIRoute) -> Requires | None:
    calls = [dependency.call for dependency in route.dependant.dependencies]
    return next((call for call in calls if isinstance(call, Requires)), None)


def _table(api: Api) -> list[tuple[str, str, Requires | None]]:
    routes = _routes(list(api.app.routes))
    return [(method, route.path, _needs(route)) for route in routes for method in sorted(route.methods)]


async def test_every_route_asks_for_a_role_or_is_on_the_short_list(api: Api) -> None:
    """A new route cannot forget the check."""
    table = _table(api)
    assert len(table) > 30
    assert {(method, path) for method, path, needs in table if needs is None} == PUBLIC


async def test_without_a_token_everything_is_401_and_with_too_small_a_role_403(api: Api) -> None:
    """The full matrix of route and role, from the table of routes."""
    clients = {role: await api.as_user(f"a {role}", role) for role in RANKING}
    for method, path, needs in _table(api):
        if needs is None:
            continue
        url = path.format(job_id=new_id(), checkpoint_id=new_id(), plan_id=new_id())
        answer = await api.nobody.request(method, url)
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized"), (method, path)
        assert "WWW-Authenticate" in answer.headers
        for role, client in clients.items():
            if path == "/v1/feed":
                continue  # a stream that does not end; see test_api_feed
            status = (await client.request(method, url)).status_code
            allowed = RANKING[role] >= RANKING[needs.role]
            assert (status != 403) == allowed and status != 401, (method, path, role, status)


async def test_a_member_looks_at_every_job_and_acts_on_their_own(api: Api) -> None:
    """Reading is open to all; every change of another's job is 403 and changes nothing."""
    theirs = await api.submit()
    path = f"/v1/jobs/{theirs['id']}"
    async with await api.as_user("ada", "member") as ada:
        assert (await ada.get(path)).status_code == 200
        refused = [await ada.post(f"{path}/{action}") for action in ("cancel", "kill", "pause", "resume")]
        refused += [await ada.patch(path, json={"name": "mine"}), await ada.delete(path)]
        assert [answer.status_code for answer in refused] == [403] * 6
        bulk = (await ada.post("/v1/jobs/cancel", json={"filter": {}})).json()["results"]
        assert [(r["id"], r["ok"]) for r in bulk] == [(theirs["id"], False)]
        own = (await ada.post(f"{path}/clone")).json()
        assert own["owner"] == "ada"
        assert (await ada.post(f"/v1/jobs/{own['id']}/cancel")).json()["status"] == "cancelled"
    assert (await api.admin.get(path)).json() == theirs


async def test_the_admin_makes_tokens_and_a_new_role_counts(api: Api) -> None:
    """The token is shown once and works; nobody else may make one."""
    made = await api.admin.post("/v1/tokens", json={"name": "ada", "role": "viewer"})
    assert made.status_code == 201
    async with api.client(made.json()["token"]) as ada:
        assert (await ada.get("/v1/me")).json() == {"name": "ada", "role": "viewer"}
        assert (await ada.post("/v1/tokens", json={"name": "eve"})).status_code == 403
    for name in ("", "a/b", "a:b", "x" * 101, "new\nline"):
        assert (await api.admin.post("/v1/tokens", json={"name": name})).status_code == 422


async def test_the_login_link_becomes_a_cookie_that_scripts_and_other_sites_cannot_use(api: Api) -> None:
    """303 to the dashboard; HttpOnly, SameSite=Strict; the token itself is in neither cookie nor address."""
    answer = await api.nobody.get("/login", params={"token": ADMIN_TOKEN})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and ADMIN_TOKEN not in cookie
    me = await api.nobody.get("/v1/me")
    assert me.json() == {"name": "admin", "role": "admin"}


async def test_logging_out_ends_the_session_at_once(api: Api) -> None:
    """The old cookie is worth nothing, although it was just used."""
    await api.nobody.post("/v1/login", json={"token": ADMIN_TOKEN})
    cookie = {"Cookie": f"{COOKIE}={api.nobody.cookies[COOKIE]}"}
    async with api.client() as other:
        assert (await other.get("/v1/me", headers=cookie)).status_code == 200
        assert (await api.nobody.post("/v1/logout")).status_code == 204
        assert (await other.get("/v1/me", headers=cookie)).status_code == 401


async def test_a_wrong_token_does_not_log_in(api: Api) -> None:
    """401 by link and by form, 422 for what no token can be, and no cookie."""
    link = await api.nobody.get("/login", params={"token": "guess"})
    form = await api.nobody.post("/v1/login", json={"token": "guess"})
    text = await api.nobody.post("/v1/login", json={"token": "guess\x00"})
    assert [answer.status_code for answer in (link, form, text)] == [401, 401, 422]
    assert not [answer for answer in (link, form, text) if "set-cookie" in answer.headers]
    assert (await api.client("bad").get("/v1/me")).status_code == 401


async def test_a_session_that_has_expired_is_refused(api: Api) -> None:
    """Time ends it, and the next login removes it."""
    async with api.database.write() as tx:
        secret = await users.open_session(tx, "admin", timedelta(seconds=-1))
    async with api.client() as client:
        assert (await client.get("/v1/me", headers={"Cookie": f"{COOKIE}={secret}"})).status_code == 401


async def test_a_page_of_another_site_cannot_write(api: Api) -> None:
    """A foreign or null Origin is refused on every write, with the cookie and with the token; our own passes."""
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9999", "https://127.0.0.1:8470.evil.example"):
        answer = await api.admin.post("/v1/jobs/cancel", json={"ids": []}, headers={"Origin": origin})
        assert (answer.status_code, answer.json()["code"]) == (403, "origin_refused"), origin
    ours = {"Origin": "http://127.0.0.1:8470"}
    assert (await api.admin.post("/v1/jobs/cancel", json={"ids": []}, headers=ours)).status_code == 200


async def test_a_name_that_is_not_ours_is_not_served(api: Api) -> None:
    """DNS rebinding: the Host must be an address, localhost or a name that was configured."""
    for host in ("evil.example", "evil.example:8470", "", "127.0.0.1.evil.example", "["):
        answer = await api.admin.get("/v1/me", headers={"Host": host})
        assert answer.status_code in (400, 403), host
    for host in ("localhost:8470", "127.0.0.1", "[::1]:8470", "10.1.2.3"):
        assert (await api.admin.get("/v1/me", headers={"Host": host})).status_code == 200, host


def test_the_token_file_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    """Mode 0600 from the first moment, also under a loose umask; the second start reads the same token."""
    path = tmp_path / "token"
    before = os.umask(0)
    try:
        first = read_or_make_token(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(first) >= 40
    path.chmod(0o644)
    assert read_or_make_token(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_no_secret_is_stored_as_it_is(api: Api, tmp_path: Path) -> None:
    """The database holds hashes."""
    made = (await api.admin.post("/v1/tokens", json={"name": "ada"})).json()["token"]
    await api.nobody.post("/v1/login", json={"token": made})
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("auth.db*"))
    for secret in (made, ADMIN_TOKEN, api.nobody.cookies[COOKIE]):
        assert secret.encode() not in stored


def test_the_access_log_shows_no_token() -> None:
    """The login link's token is taken out of the line."""
    record = logging.LogRecord("uvicorn.access", 20, "", 0, "%s %s", ("GET", "/login?token=s3cret&x=1"), None)
    assert RedactTokens().filter(record)
    assert record.getMessage() == "GET /login?token=***&x=1"


def test_ownership_is_by_name_and_the_admin_owns_all() -> None:
    """The rule alone."""
    check_owner(Principal("root", "admin"), "ada")
    check_owner(Principal("ada", "member"), "ada")
    with pytest.raises(ApiError):
        check_owner(Principal("eve", "member"), "ada")
