"""Who may do what: tokens, browser sessions, roles, and the Host and Origin of a request.

The first start makes an admin token, mode 0600, in the data folder. A browser trades it at `/login?token=...` for an
HttpOnly, SameSite=Strict cookie. Everybody who may read may read every job; a member acts on their own jobs, an admin
on all.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.db import Database
from server.errors import ApiError, problem_of, problem_response
from server.rows import users
from server.rows.users import Principal
from server.settings import Settings
from server.views import Role

COOKIE = "shardyard_session"
SESSION = timedelta(days=30)
REMEMBERED_SECONDS = 5.0  # how long a revoked token may go on working
RANKING: dict[Role, int] = {"viewer": 0, "member": 1, "admin": 2}
ADMIN = "admin"
_SAFE = ("GET", "HEAD", "OPTIONS")
_TOKEN_IN_URL = re.compile(r"(token=)[^&\s\"']+")


def read_or_make_token(path: Path) -> str:
    """The admin token of a data folder; made at first start, readable by its owner only."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        os.chmod(path, 0o600)
        return path.read_text().strip()
    with os.fdopen(descriptor, "w") as file:
        secret = users.new_secret()
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())
    return secret


async def ensure_admin(database: Database, token: str) -> None:
    """Let `token` stand for the user `admin`."""
    async with database.write() as tx:
        await users.put_token(tx, await users.put_user(tx, ADMIN, "admin"), token, "api")


def login_link(base_url: str, token: str) -> str:
    """The link that a person clicks once."""
    return f"{base_url.rstrip('/')}/login?token={token}"


class Gate:
    """Looks secrets up and remembers them for a few seconds. One per app."""

    def __init__(self, database: Database, settings: Settings, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._monotonic = monotonic
        self._known: dict[str, tuple[float, Principal]] = {}  # secret hash -> (until, who)
        self._attempts: dict[str, str] = {}  # attempt id -> hash of its report token, which never changes
        self._hosts = _known_hosts(settings)

    async def principal(self, request: Request) -> Principal:
        """Who asks. Raises ApiError 401."""
        secret = bearer(request) or request.cookies.get(COOKIE, "")
        if not secret:
            raise _unauthorized("A token is needed: Authorization: Bearer TOKEN, or log in with the link.")
        key = users.secret_hash(secret)
        until, known = self._known.get(key, (0.0, None))
        if known is not None and self._monotonic() < until:
            return known
        found = await self._look_up(secret)
        if found is None:
            self._known.pop(key, None)
            raise _unauthorized("This token is not known here, or has expired.")
        if len(self._known) > 1000:
            self._known.clear()
        self._known[key] = (self._monotonic() + REMEMBERED_SECONDS, found)
        return found

    async def check_attempt(self, request: Request, attempt_id: str) -> None:
        """Let only the ranks of an attempt report for it. Raises ApiError 401."""
        secret = bearer(request)
        if secret is None:
            raise _unauthorized("A report needs the token of its attempt.")
        stored = self._attempts.get(attempt_id)
        if stored is None:
            async with self._database.read() as connection:
                stored = await users.report_token_hash(connection, attempt_id)
        if stored is None or not secrets.compare_digest(stored, users.secret_hash(secret)):
            raise _unauthorized("This is not the token of that attempt.")
        if len(self._attempts) > 1000:
            self._attempts.clear()
        self._attempts[attempt_id] = stored

    async def log_in(self, secret: str) -> str:
        """Trade a token for a session secret. Raises ApiError 401."""
        found = await self._look_up(secret)
        if found is None:
            raise _unauthorized("This token is not known here, or has expired.")
        async with self._database.write() as tx:
            return await users.open_session(tx, found.name, SESSION)

    async def log_out(self, secret: str) -> None:
        """End a session at once."""
        async with self._database.write() as tx:
            await users.drop_secret(tx, secret)
        self._known.pop(users.secret_hash(secret), None)

    def check_origin(self, request: HTTPConnection, method: str) -> None:
        """Refuse a Host that is not ours (DNS rebinding) and a write from another site's page. Raises ApiError 403."""
        host = request.headers.get("host", "")
        if not self._is_our_host(host):
            raise ApiError(403, f"The host {host[:100]!r} is not served here.", code="host_refused")
        origin = request.headers.get("origin")
        if origin is None or method in _SAFE:
            return
        if urlsplit(origin).netloc.lower() != host.lower():
            raise ApiError(403, f"Requests from pages of {origin[:100]!r} are refused.", code="origin_refused")

    def _is_our_host(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self._hosts or _is_address(name)

    async def _look_up(self, secret: str) -> Principal | None:
        async with self._database.read() as connection:
            return await users.principal(connection, secret, self._database.now())


class OriginCheck:
    """Asks the gate about Host and Origin before any route sees the request."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self.app = app
        self.gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self.gate.check_origin(HTTPConnection(scope), scope["method"])
            except ApiError as error:
                await problem_response(problem_of(error, scope["path"]))(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _known_hosts(settings: Settings) -> frozenset[str]:
    public = urlsplit(settings.public_url).hostname if settings.public_url else None
    return frozenset(name.lower() for name in ("localhost", settings.host, public) if name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def bearer(request: Request) -> str | None:
    """The secret of the Authorization header, or None."""
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" and secret.strip() else None


def set_cookie(response: Response, secret: str, *, secure: bool) -> None:
    """Hand a session to the browser."""
    response.set_cookie(
        COOKIE, secret, max_age=int(SESSION.total_seconds()), httponly=True, samesite="strict", secure=secure, path="/"
    )


def _unauthorized(detail: str) -> ApiError:
    return ApiError(401, detail, headers={"WWW-Authenticate": 'Bearer realm="shardyard"'})


class Requires:
    """A dependency that lets a role, and those above it, through; every route but the public ones has one."""

    def __init__(self, role: Role) -> None:
        self.role = role

    async def __call__(self, request: Request) -> Principal:
        gate: Gate = request.app.state.gate
        found = await gate.principal(request)
        if RANKING[found.role] < RANKING[self.role]:
            raise ApiError(403, f"This needs the role {self.role}; {found.name} is {found.role}.")
        return found


Viewer = Annotated[Principal, Depends(Requires("viewer"))]
Member = Annotated[Principal, Depends(Requires("member"))]
Admin = Annotated[Principal, Depends(Requires("admin"))]


def check_owner(who: Principal, owner: str) -> None:
    """A member acts on their own jobs only. Raises ApiError 403."""
    if who.role != "admin" and who.name != owner:
        raise ApiError(403, f"This job belongs to {owner}; {who.name} may look at it, not change it.")


class RedactTokens(logging.Filter):
    """Keeps the tokens of login links out of the access log."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(_TOKEN_IN_URL.sub(r"\1***", a) if isinstance(a, str) else a for a in record.args)
        return True
