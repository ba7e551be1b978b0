"""Where a job comes from and what came of it: attempts, forks and clones, with the checkpoints between them."""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime, Field

from server.states import AttemptStatus, Status
from server.views.view import View


class LineageAttempt(View):
    """One attempt as a stretch of steps."""

    number: int
    status: AttemptStatus
    ranks: int
    stage: int
    created_at: AwareDatetime
    first_step: int = Field(description="where it began: 0, or the step of the checkpoint")
    last_step: int = Field(description="the last step it reported; first_step before that")


class LineageJob(View):
    """A job of the family; `generation` is 0 for the job asked about, negative for what it comes from."""

    id: str
    name: str
    status: Status
    generation: int
    kind: Literal["original", "clone", "fork"]
    steps: int
    attempts: list[LineageAttempt]


class LineageLink(View):
    """How a stretch of steps begins: from which checkpoint of which attempt, on how many ranks before and after."""

    kind: Literal["resume", "fork", "clone"]
    from_job: str
    from_attempt: int | None = Field(description="None: a clone takes the spec, not a checkpoint")
    to_job: str
    to_attempt: int | None = Field(description="None: it has not started yet")
    checkpoint: str | None
    step: int
    from_ranks: int | None
    from_stage: int | None
    to_ranks: int | None
    to_stage: int | None
    resharded: bool = Field(description="ranks or stage differ from those that wrote the checkpoint")


class LineageView(View):
    """The family of a job."""

    job_id: str
    jobs: list[LineageJob]
    links: list[LineageLink]
    truncated: bool = Field(description="there are more jobs of the family than are shown")
