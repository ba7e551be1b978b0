"""Launches of a job, their ranks, and the exception that ended one."""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime, Field

from server.states import AttemptStatus
from server.views.view import ReasonView, View


class RankView(View):
    """One rank of an attempt as last seen."""

    rank: int
    status: Literal["starting", "running", "exited", "lost"]
    phase: str | None
    node: str | None
    pid: int | None
    step: int
    heartbeat_age_seconds: float | None
    exit_code: int | None = None
    signal: int | None = None
    peak_rss_bytes: int | None = None


class ErrorView(View):
    """The exception of the first failing rank."""

    rank: int | None
    type: str
    message: str
    traceback: str
    code: str | None = None


class SavingView(View):
    """The save that runs now."""

    step: int
    since: AwareDatetime


class AttemptView(View):
    """One launch of the whole group of ranks; never changed once it has ended."""

    id: str
    number: int = Field(description="also the fence")
    status: AttemptStatus
    reason: ReasonView | None
    error: ErrorView | None
    ranks: int
    stage: int
    device: Literal["cpu", "cuda"] | None
    created_at: AwareDatetime
    started_at: AwareDatetime | None = Field(description="first rank training")
    ended_at: AwareDatetime | None
    resumed_from_step: int | None
    resumed_from_checkpoint: str | None
    first_step: int | None
    last_step: int | None
    digest: str | None
    saving: SavingView | None = Field(default=None, description="the checkpoint being saved now, if any")
    rank_states: list[RankView]
