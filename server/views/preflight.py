"""What a resume or a fork would read and need, before anything is launched."""

from __future__ import annotations

from pydantic import Field

from server.views.plans import StagePlan
from server.views.view import View


class PassedOver(View):
    """A newer checkpoint that a resume does not take, and why."""

    checkpoint: str
    step: int
    attempt: int
    why: str


class PreflightView(View):
    """A resume before it is asked for: where it begins, what each rank reads, and whether it fits."""

    job_id: str
    checkpoint: str | None = Field(description="id; None: it begins at step 0")
    step: int = Field(description="of the checkpoint")
    steps: int = Field(description="to train to")
    passed_over: list[PassedOver] = Field(description="newer ones that are damaged")
    from_ranks: int | None = Field(description="that wrote the checkpoint")
    from_stage: int | None
    ranks: int
    stage: int
    resharded: bool = Field(description="ranks or stage differ from those that wrote the checkpoint")
    checkpoint_bytes: int
    read_bytes: list[int] = Field(description="index: rank; bytes that it reads of the checkpoint")
    plan: StagePlan = Field(description="bytes and traffic of the largest rank at this stage")
    device_memory_bytes: int | None = Field(description="of one rank's device; None: not known")
    fits: bool
    note: str | None = Field(default=None, description="what keeps it from being exact")
