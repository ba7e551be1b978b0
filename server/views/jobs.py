"""Jobs as the list shows them and as their page does, what happened to them, what a bulk action did."""

from __future__ import annotations

from typing import Any

from pydantic import AwareDatetime, Field

from server.states import Action, Desired, Status
from server.views.attempts import AttemptView, ErrorView
from server.views.view import Page, ReasonView, View
from workers.contract import Number


class JobListItem(View):
    """One row of the jobs table; everything comes from summary rows, never from points."""

    id: str
    name: str
    tags: list[str]
    owner: str
    status: Status
    desired: Desired
    reason: ReasonView | None
    priority: int
    version: int = Field(description="grows with every change; the ETag for If-Match")
    created_at: AwareDatetime
    started_at: AwareDatetime | None = Field(description="first attempt's launch")
    ended_at: AwareDatetime | None
    phase: str | None = Field(description="phase of the slowest rank of the running attempt", examples=["training"])
    step: int = Field(description="last completed optimizer step")
    steps: int = Field(description="steps asked for")
    loss: Number | None
    sparkline: list[float | None] = Field(
        description="at most 40 values of the loss, evenly over the steps; null: non-finite or absent"
    )
    ranks: int
    stage: int | None = Field(description="None: auto, not yet decided")
    attempt: int = Field(description="number of the newest attempt, 0 before the first")
    model_kind: str
    eta_seconds: float | None
    last_report_at: AwareDatetime | None = Field(description="last sign of life of the running attempt")
    allowed_actions: list[Action]


class JobPage(Page[JobListItem]):
    """A page of jobs, with how many jobs there are per status under the same filters but the status itself."""

    counts: dict[str, int]


class JobView(JobListItem):
    """A job with all that its page shows."""

    spec: dict[str, Any]
    spec_yaml: str
    chunk: int = Field(description="C, fixed at submit")
    micro_batches: int = Field(description="V")
    tokens_per_second: Number | None
    digest: str | None = Field(description="16 hex digits after the last digested step")
    cloned_from: str | None = Field(description="the job whose spec it began with")
    forked_from: str | None = Field(description="the checkpoint of that job whose state it began with")
    fork_step: int | None = Field(description="step of that checkpoint")
    error: ErrorView | None
    current_attempt: AttemptView | None


class EventView(View):
    """Something that happened to a job; transitions carry old and new."""

    id: int
    job_id: str | None
    attempt: int | None
    rank: int | None
    at: AwareDatetime
    action: str = Field(examples=["job.cancel_requested"])
    actor: str = Field(examples=["user:admin", "controller", "rank:0"])
    cause: str | None
    old: str | None
    new: str | None
    message: str
    data: dict[str, Any]


class ActionResult(View):
    """One job's result of a bulk action."""

    id: str
    ok: bool
    status: Status | None
    error: str | None = None


class BulkResult(View):
    """A result for each job asked for."""

    results: list[ActionResult]
