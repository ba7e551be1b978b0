"""Logging in and out, who am I, and tokens for others."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import RedirectResponse

from server.auth import COOKIE, Admin, Viewer, set_cookie
from server.routes.state import ERRORS, Db, TheGate
from server.rows import users
from server.views import MeView, Role, View

router = APIRouter(tags=["session"], responses=ERRORS)


class LoginBody(BaseModel):
    """A token pasted into the page."""

    model_config = ConfigDict(extra="forbid")
    token: Annotated[str, Field(min_length=1, max_length=500)]


class NewToken(BaseModel):
    """A user to create, or to give another token and role."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f/:]+$", examples=["ada"])]
    role: Role = "member"


class TokenView(View):
    """A token, shown this once."""

    name: str
    role: Role
    token: str


@router.get("/login", include_in_schema=False)
async def login_by_link(request: Request, gate: TheGate, token: Annotated[str, Query(max_length=500)]) -> Response:
    """The link that the server prints: sets the cookie and shows the dashboard."""
    answer = RedirectResponse("/", 303)
    set_cookie(answer, await gate.log_in(token), secure=request.url.scheme == "https")
    return answer


@router.post("/v1/login", status_code=204, operation_id="login")
async def login(body: LoginBody, request: Request, gate: TheGate) -> Response:
    """Trade a token for a session cookie."""
    answer = Response(status_code=204)
    set_cookie(answer, await gate.log_in(body.token), secure=request.url.scheme == "https")
    return answer


@router.post("/v1/logout", status_code=204, operation_id="logout")
async def logout(request: Request, gate: TheGate) -> Response:
    """End the session of this browser."""
    secret = request.cookies.get(COOKIE)
    if secret:
        await gate.log_out(secret)
    answer = Response(status_code=204)
    answer.delete_cookie(COOKIE, path="/")
    return answer


@router.get("/v1/me", operation_id="getMe")
async def me(who: Viewer) -> MeView:
    """Who the presented token belongs to."""
    return MeView(name=who.name, role=who.role)


@router.post("/v1/tokens", status_code=201, operation_id="createToken")
async def create_token(body: NewToken, who: Admin, database: Db) -> TokenView:
    """Make a token for a user; creates the user, or sets the role of one that exists."""
    secret = users.new_secret()
    async with database.write() as tx:
        await users.put_token(tx, await users.put_user(tx, body.name, body.role), secret, "api")
    return TokenView(name=body.name, role=body.role, token=secret)
