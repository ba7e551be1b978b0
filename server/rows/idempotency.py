"""Idempotency keys: which job a key made. Both are written in one transaction, so neither is ever alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Database, Tx
from server.errors import ApiError
from server.models import IdempotencyKey
from server.rows import new_jobs
from server.rows.new_jobs import NewJob

Check = Callable[[Tx], Awaitable[None]]


@dataclass(frozen=True)
class Submission:
    """A job to create, at most once per (owner, key)."""

    job: NewJob
    key: str | None
    body_hash: str  # of what the client sent, in canonical form
    check: Check | None = None  # run first in the job's transaction; what it raises keeps the job from being made


@dataclass(frozen=True)
class Submitted:
    """The job of a submission."""

    job_id: str
    created: bool  # False: an earlier submission with this key made it


class _KeyTaken(Exception):
    """Another transaction wrote this key first; ours must leave nothing behind."""


def canonical_hash(*parts: Mapping[str, Any] | str) -> str:
    """A hash that does not depend on key order or white space."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


async def submit(database: Database, submission: Submission) -> Submitted:
    """Create the job, or find the one that this key made. Raises ApiError 422 when the key came with another body."""
    known = await _known(database, submission)
    if known is not None:
        return known

    async def work(tx: Tx) -> None:
        if submission.check is not None:
            await submission.check(tx)
        await new_jobs.create(tx, submission.job)
        if submission.key is not None and not await _claim(tx, submission, submission.key):
            raise _KeyTaken

    try:
        await database.transact(work)
    except _KeyTaken:
        known = await _known(database, submission)
        assert known is not None, f"key {submission.key!r} was taken and is not there"
        return known
    return Submitted(submission.job.id, created=True)


async def _known(database: Database, submission: Submission) -> Submitted | None:
    if submission.key is None:
        return None
    async with database.read() as connection:
        row = await _find(connection, submission.job.owner, submission.key)
    if row is None:
        return None
    if row.body_hash != submission.body_hash:
        detail = f"The Idempotency-Key {submission.key[:80]!r} was used with another body; use a fresh one."
        raise ApiError(422, detail, code="idempotency_key_reused")
    return Submitted(row.job_id, created=False)


async def _find(connection: AsyncConnection, owner: str, key: str) -> Any:
    statement = select(IdempotencyKey.job_id, IdempotencyKey.body_hash).where(
        IdempotencyKey.owner == owner, IdempotencyKey.key == key
    )
    return (await connection.execute(statement)).one_or_none()


async def _claim(tx: Tx, submission: Submission, key: str) -> bool:
    statement = (
        tx.insert(IdempotencyKey)
        .values(
            owner=submission.job.owner,
            key=key,
            body_hash=submission.body_hash,
            job_id=submission.job.id,
            created_at=tx.now,
        )
        .on_conflict_do_nothing(index_elements=["owner", "key"])
        .returning(IdempotencyKey.job_id)
    )
    return (await tx.execute(statement)).one_or_none() is not None
