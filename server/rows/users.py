"""Users, their tokens and browser sessions. A secret is stored as its SHA-256 only."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, cast

from sqlalchemy import delete, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.ids import new_id
from server.models import Attempt, Token, User
from server.views import Role


@dataclass(frozen=True)
class Principal:
    """Who a request comes from."""

    name: str
    role: Role


def new_secret() -> str:
    """A fresh secret of 256 bits, safe in URLs and headers."""
    return secrets.token_urlsafe(32)


def secret_hash(secret: str) -> str:
    """What is stored of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


async def put_user(tx: Tx, name: str, role: Role) -> str:
    """Create a user, or change the role of one that exists; returns the id."""
    await tx.execute(
        tx.insert(User)
        .values(id=new_id(), name=name, role=role, created_at=tx.now)
        .on_conflict_do_update(index_elements=["name"], set_={"role": role})
    )
    row = (await tx.execute(select(User.id).where(User.name == name))).one()
    return str(row.id)


async def put_token(
    tx: Tx, user_id: str, secret: str, kind: Literal["api", "session"], *, valid_for: timedelta | None = None
) -> None:
    """Let `secret` stand for the user; a known secret stays as it is."""
    await tx.execute(
        tx.insert(Token)
        .values(
            id=new_id(),
            user_id=user_id,
            hash=secret_hash(secret),
            kind=kind,
            created_at=tx.now,
            expires_at=None if valid_for is None else tx.now + valid_for,
        )
        .on_conflict_do_nothing(index_elements=["hash"])
    )


async def open_session(tx: Tx, name: str, valid_for: timedelta) -> str:
    """A new browser session of the user called `name`; sessions that have expired are removed."""
    await tx.execute(delete(Token).where(Token.expires_at <= tx.now))
    user = (await tx.execute(select(User.id).where(User.name == name))).one()
    secret = new_secret()
    await put_token(tx, user.id, secret, "session", valid_for=valid_for)
    return secret


async def drop_secret(tx: Tx, secret: str) -> None:
    """End a session or revoke a token."""
    await tx.execute(delete(Token).where(Token.hash == secret_hash(secret)))


async def principal(connection: AsyncConnection, secret: str, now: datetime) -> Principal | None:
    """Who `secret` stands for now, or None."""
    statement = (
        select(User.name, User.role)
        .join(Token, Token.user_id == User.id)
        .where(Token.hash == secret_hash(secret), or_(Token.expires_at.is_(None), Token.expires_at > now))
    )
    row = (await connection.execute(statement)).one_or_none()
    return None if row is None else Principal(row.name, cast(Role, row.role))


async def report_token_hash(connection: AsyncConnection, attempt_id: str) -> str | None:
    """What is stored of the report token of an attempt; None without the attempt."""
    return await connection.scalar(select(Attempt.token_hash).where(Attempt.id == attempt_id))
