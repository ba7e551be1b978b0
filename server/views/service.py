"""The service itself: who asks, what changed, how it is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from server.views.view import View

Role = Literal["admin", "member", "viewer"]
Topic = Literal["job", "metrics", "memory", "ledger", "logs", "checkpoints", "events", "queue", "nodes"]


class MeView(View):
    """Who the presented token belongs to."""

    name: str
    role: Role


class FeedChange(View):
    """Data of an SSE message of `/v1/feed`: something of this topic changed; fetch what you show."""

    topic: Topic
    job_id: str | None
    version: Annotated[int | None, Field(description="job version after the change, when the topic is job")] = None


class HealthView(View):
    """Liveness or readiness."""

    status: Literal["ok", "unavailable"]
    checks: dict[str, str] = Field(default={})
