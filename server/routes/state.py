"""What a route may reach: the database, the settings, the feed; and the ids in a path."""

from __future__ import annotations

from typing import Annotated, Any, cast

from fastapi import Depends, Path, Request

from server.auth import Gate
from server.db import Database
from server.errors import not_found
from server.feed import Feed
from server.ids import is_id
from server.settings import Settings
from server.views import Problem

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "The request cannot be answered; the problem says what to change.",
        "model": Problem,
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
}


def _database(request: Request) -> Database:
    return cast(Database, request.app.state.database)


def _settings(request: Request) -> Settings:
    return cast(Settings, request.app.state.settings)


def _feed(request: Request) -> Feed:
    return cast(Feed, request.app.state.feed)


def _gate(request: Request) -> Gate:
    return cast(Gate, request.app.state.gate)


def _job_id(job_id: Annotated[str, Path(description="UUIDv7 of a job")]) -> str:
    if not is_id(job_id):
        raise not_found("job", job_id)
    return job_id


def _checkpoint_id(checkpoint_id: Annotated[str, Path(description="UUIDv7 of a checkpoint")]) -> str:
    if not is_id(checkpoint_id):
        raise not_found("checkpoint", checkpoint_id)
    return checkpoint_id


Db = Annotated[Database, Depends(_database)]
TheSettings = Annotated[Settings, Depends(_settings)]
TheFeed = Annotated[Feed, Depends(_feed)]
TheGate = Annotated[Gate, Depends(_gate)]
JobKey = Annotated[str, Depends(_job_id)]
CheckpointKey = Annotated[str, Depends(_checkpoint_id)]
