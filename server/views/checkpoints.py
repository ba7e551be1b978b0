"""Published checkpoints, their files, and what reading them found."""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime

from server.views.view import View
from workers.contract import Number


class CheckpointShardView(View):
    """One rank's file of a checkpoint."""

    rank: int
    file: str
    bytes: int
    checksum: str
    status: Literal["ok", "missing", "corrupt"]


class CheckpointView(View):
    """A published checkpoint."""

    id: str
    job_id: str
    attempt: int
    step: int
    folder: str
    status: Literal["complete", "verified", "corrupt", "deleted"]
    problem: str | None
    ranks: int
    stage: int
    bytes: int
    digest: str
    eval_loss: Number | None
    seconds: float
    pinned: bool
    created_at: AwareDatetime
    shards: list[CheckpointShardView]


class VerifyResult(View):
    """What reading every byte of a checkpoint found."""

    checkpoint: CheckpointView
    ok: bool
    problems: list[str]
