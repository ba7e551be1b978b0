"""Published checkpoints, their files, and what reading them found."""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime, Field

from server.views.view import Page, View
from workers.contract import Number


class CheckpointShardView(View):
    """One rank's file of a checkpoint."""

    rank: int
    file: str
    bytes: int
    checksum: str
    status: Literal["ok", "missing", "corrupt"]
    verified_at: AwareDatetime | None = Field(default=None, description="when its bytes were last read back")


class NeededBy(View):
    """A job that needs a checkpoint: it goes on from it, reads it now, or was forked from it."""

    job_id: str
    name: str


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
    seconds_by: dict[str, float] = Field(
        default={},
        description="parts of a save beside training: copy; write (hash, write, sync of rank 0); publish (the other "
        "ranks' shards, the manifest). blocked: training waited, meanwhile",
    )
    pinned: bool
    created_at: AwareDatetime
    verified_at: AwareDatetime | None = Field(default=None, description="when every byte was last read back")
    needed_by: list[NeededBy] = Field(default=[], description="retention and deletion leave it alone while there are")
    bad_ranks: list[int] = Field(default=[], description="whose file is damaged or missing")
    shards: list[CheckpointShardView] = Field(
        default=[], description="each rank's file; a list of checkpoints has them with shards=true only"
    )


class CheckpointPage(Page[CheckpointView]):
    """A page of a job's checkpoints, with how many there are per status, whether listed or not."""

    counts: dict[str, int]


class VerifyResult(View):
    """What reading every byte of a checkpoint found."""

    checkpoint: CheckpointView
    ok: bool
    problems: list[str]
