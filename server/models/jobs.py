"""What people asked for: jobs, their tags, what happened to them, the keys and plans of submits."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, SmallInteger, String
from sqlalchemy.orm import Mapped, mapped_column

from server.models.columns import FINITE, Base, BigKey, Json, Uuid
from server.states import sql_check, sql_check_desired


class Job(Base):
    """What a person asked for, and the newest numbers of it for lists."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(Uuid, primary_key=True)
    name: Mapped[str]
    name_folded: Mapped[str]  # case-folded NFKC, for search and sort
    tags: Mapped[list[str]] = mapped_column(Json)
    owner: Mapped[str]  # user name
    spec: Mapped[dict[str, Any]] = mapped_column(Json)  # as it runs now: a resume may have changed ranks, zero, steps
    spec_yaml: Mapped[str]  # as submitted
    model_kind: Mapped[str]
    chunk: Mapped[int]  # C, fixed at submit
    micro_batches: Mapped[int]  # V
    ranks: Mapped[int]
    stage: Mapped[int | None]  # None: auto, not yet decided
    steps: Mapped[int]
    priority: Mapped[int]
    plan: Mapped[dict[str, Any] | None] = mapped_column(Json)  # PlanView of `spec`; None: none yet, see PlanRequest
    cloned_from: Mapped[str | None] = mapped_column(Uuid, index=True)
    forked_from: Mapped[str | None] = mapped_column(Uuid, index=True)  # checkpoint of another job; None: from step 0
    fork_step: Mapped[int | None]  # step of that checkpoint

    status: Mapped[str]
    desired: Mapped[str]
    reason: Mapped[str | None]  # code of reasons.py
    reason_data: Mapped[dict[str, Any] | None] = mapped_column(Json)
    error: Mapped[dict[str, Any] | None] = mapped_column(Json)  # ErrorView of the failure that ended it
    version: Mapped[int] = mapped_column(default=1)
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]
    queued_at: Mapped[datetime]  # order within a priority; a retry keeps it
    not_before: Mapped[datetime | None]  # back-off
    desired_at: Mapped[datetime | None]  # when the stop was asked for
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    attempt: Mapped[int] = mapped_column(default=0)  # number of the newest attempt
    user_failures: Mapped[int] = mapped_column(default=0)
    infrastructure_failures: Mapped[int] = mapped_column(default=0)
    progress_step: Mapped[int] = mapped_column(default=0)  # of the newest checkpoint when a failure was last counted
    resume_checkpoint: Mapped[str | None] = mapped_column(Uuid)  # named by a person; None: the newest usable

    phase: Mapped[str | None]
    step: Mapped[int] = mapped_column(default=0)
    loss: Mapped[float | None]
    loss_flag: Mapped[int] = mapped_column(SmallInteger, default=FINITE)
    tokens_per_second: Mapped[float | None]
    step_seconds: Mapped[float | None]
    digest: Mapped[str | None]
    last_report_at: Mapped[datetime | None]
    sparkline: Mapped[list[float | None]] = mapped_column(Json, default=list)
    sparkline_stride: Mapped[int] = mapped_column(default=1)  # steps per value
    log_seq: Mapped[int] = mapped_column(default=0)  # number of log lines so far

    __table_args__ = (
        CheckConstraint(sql_check(), name="status"),
        CheckConstraint(sql_check_desired(), name="desired"),
        Index(None, "status", "created_at", "id"),
        Index(None, "created_at", "id", "name_folded"),
        Index(None, "status", "name_folded", "id"),
        Index(None, "name_folded", "id"),
        Index(None, "loss", "id"),
        Index(None, "status", "priority", "queued_at"),
    )


class JobTag(Base):
    """One tag of a job, for filters."""

    __tablename__ = "job_tags"

    tag: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(Uuid, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True, index=True)


class Event(Base):
    """Something that happened; transitions are written in the transaction that makes them."""

    __tablename__ = "events"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    job_id: Mapped[str | None] = mapped_column(Uuid, ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt: Mapped[int | None]
    rank: Mapped[int | None]
    at: Mapped[datetime]
    action: Mapped[str]
    actor: Mapped[str]
    cause: Mapped[str | None]
    old: Mapped[str | None]
    new: Mapped[str | None]
    message: Mapped[str]
    data: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)

    __table_args__ = (Index(None, "job_id", "id"),)


class IdempotencyKey(Base):
    """The job a key made, written in the job's own transaction."""

    __tablename__ = "idempotency_keys"

    owner: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    body_hash: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str] = mapped_column(Uuid, ForeignKey("jobs.id", ondelete="CASCADE"))
    created_at: Mapped[datetime]


class PlanRequest(Base):
    """A plan that the controller makes in the background: of a job, or of a spec that somebody asks about."""

    __tablename__ = "plan_requests"

    id: Mapped[str] = mapped_column(Uuid, primary_key=True)
    job_id: Mapped[str | None] = mapped_column(Uuid, ForeignKey("jobs.id", ondelete="CASCADE"), unique=True)
    owner: Mapped[str]
    spec: Mapped[dict[str, Any]] = mapped_column(Json)
    status: Mapped[str] = mapped_column(index=True)  # pending, done, failed
    result: Mapped[dict[str, Any] | None] = mapped_column(Json)
    error: Mapped[str | None]
    created_at: Mapped[datetime]
