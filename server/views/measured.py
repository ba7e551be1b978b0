"""Memory and traffic: what was measured beside what was planned."""

from __future__ import annotations

from pydantic import AwareDatetime, Field

from server.views.view import View


class MemorySampleView(View):
    """Bytes of one rank by category at the peak of a phase."""

    step: int
    attempt: int
    rank: int
    phase: str
    at: AwareDatetime
    params: int
    grads: int
    sums: int
    master: int
    moments: int
    buckets: int
    slots: int
    pinned: int
    activations: int
    other: int
    allocated: int
    reserved: int
    rss: int


class StageBytes(View):
    """Bytes per rank of the paper's formula at one stage."""

    stage: int
    bytes: int


class MemoryView(View):
    """Measured memory beside the plan and the paper's lines."""

    job_id: str
    attempt: int | None
    ranks: int
    samples: list[MemorySampleView]
    phases: list[MemorySampleView] = Field(description="newest sample of each rank and phase")
    plan: list[dict[str, int]] = Field(description="index: rank; bytes by category")
    paper: list[StageBytes]


class LedgerEntry(View):
    """One purpose on one rank: planned beside measured."""

    purpose: str
    planned_bytes: int | None
    measured_bytes: int | None
    seconds: float | None


class RankLedger(View):
    """Traffic of one rank in its newest reported step."""

    rank: int
    step: int
    entries: list[LedgerEntry]
    planned_bytes: int
    measured_bytes: int


class LedgerView(View):
    """Traffic against plan."""

    job_id: str
    attempt: int | None
    ranks: list[RankLedger]
    planned_bytes: int = Field(description="all ranks")
    measured_bytes: int = Field(description="all ranks")
    paper_bytes: int | None = Field(description="the paper's volume of gradients and parameters, all ranks")
