"""Nodes, who holds their slots, and what waits for them."""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime, Field

from server.states import Status
from server.views.view import ReasonView, View


class ExplainView(View):
    """Why a job is where it is, and what would move it."""

    job_id: str
    status: Status
    reason: ReasonView | None
    sentence: str
    unblock: str | None
    position: int | None = Field(description="1-based place in the queue")
    jobs_ahead: list[str]
    requested_slots: int
    free_slots: int
    total_slots: int
    max_ranks: int


class Holder(View):
    """A rank that holds a slot."""

    job_id: str
    job_name: str
    attempt: int
    rank: int


class NodeView(View):
    """One machine of the cluster as last seen."""

    id: str
    address: str
    alive: bool
    device: Literal["cpu", "cuda"]
    slots: int
    free_slots: int
    memory_bytes: int
    device_memory_bytes: int
    devices: list[str]
    seen_at: AwareDatetime
    holders: list[Holder]


class NodesView(View):
    """The cluster."""

    items: list[NodeView]


class QueueItem(View):
    """A job that waits."""

    job_id: str
    name: str
    position: int
    ranks: int
    priority: int
    waiting_since: AwareDatetime
    reason: ReasonView | None
    unblock: str | None


class QueueView(View):
    """The queue in the order of start."""

    items: list[QueueItem]
