"""What a spec would cost, stage by stage."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from server.views.view import View


class StepSecondsView(View):
    """A step as this machine's calibration predicts it."""

    compute: float
    exchange: float
    update: float
    total: float


class StagePlan(View):
    """The plan of one ZeRO stage."""

    stage: int
    fits: bool
    memory: dict[str, int] = Field(description="bytes by category of the largest rank")
    total_bytes: int
    traffic: dict[str, int] = Field(description="bytes a step by collective/purpose, busiest rank")
    total_traffic_bytes: int
    paper_bytes: int
    paper_traffic_bytes: int
    saving: float = Field(description="1 - total / total of stage 0")
    communication_seconds: float | None = Field(default=None, description="a step's traffic at the link's speed")
    step_seconds: StepSecondsView | None = Field(default=None, description="predicted; None without a calibration")


class PlanView(View):
    """What a spec would cost, before launch."""

    ranks: int
    micro_batches: int
    chunk: int
    parameters: int
    padded_parameters: int
    exact: bool = Field(description="false: the vocabulary or the user's model is not known before the start")
    device_memory_bytes: int | None = Field(description="of one rank's device; None: not known, everything fits")
    activation_bytes: int | None = Field(description="estimate for one micro-batch; not owned by the engine")
    activation_source: str = Field(default="", description="how the estimate was found, or why there is none")
    flops: int | None = Field(default=None, description="operations of one micro-batch, forward and backward")
    step_basis: str | None = Field(
        default=None,
        description="what predicted seconds count and on which machine; without any, how to get them",
    )
    advised_stage: int
    advice: str
    fits: bool
    idle_share: float = Field(description="share of rank time idle because V is not divisible by ranks")
    note: str | None = Field(default=None, description="what the spec would need for this many ranks")
    link_gbps: float | None = None
    stages: list[StagePlan]


PlanStatus = Literal["pending", "done", "failed"]  # being made, made, cannot be made


class PendingPlan(View):
    """A user's model is built in a process of its own to be planned: fetch the result later."""

    id: str
    status: PlanStatus
    href: str
    plan: PlanView | None = None
    error: str | None = None


class JobPlanView(View):
    """The plan of a job: predicted before launch, and as the engine of the newest attempt computed it."""

    job_id: str
    status: PlanStatus | None = Field(
        description="pending: a user's model is being built to be planned; failed: it cannot be; null: nobody asked yet"
    )
    failure: str | None = Field(default=None, description="why no plan can be made")
    predicted: PlanView | None
    attempt: int | None
    memory: list[dict[str, int]] = Field(description="index: rank; bytes by category, from the engine")
    traffic: list[dict[str, int]] = Field(description="index: rank; bytes by purpose, from the engine")
    stage: int | None
    chunk: int
    parameters: int | None
    predicted_seconds: float | None = Field(default=None, description="a step at the attempt's stage")
    measured_seconds: float | None = Field(default=None, description="median of the attempt's newest steps")
    error: float | None = Field(default=None, description="predicted / measured - 1")
