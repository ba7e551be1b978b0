"""Launches: an attempt, its ranks, and how far each rank's reports are applied."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from server.models.columns import Base, Json, Uuid
from server.states import sql_check_attempt


class Attempt(Base):
    """One launch of a job's whole group of ranks."""

    __tablename__ = "attempts"

    id: Mapped[str] = mapped_column(Uuid, primary_key=True)
    job_id: Mapped[str] = mapped_column(Uuid, ForeignKey("jobs.id", ondelete="CASCADE"))
    number: Mapped[int]  # the fence
    status: Mapped[str]
    reason: Mapped[str | None]
    reason_data: Mapped[dict[str, Any] | None] = mapped_column(Json)
    error: Mapped[dict[str, Any] | None] = mapped_column(Json)
    ranks: Mapped[int]
    stage: Mapped[int]
    chunk: Mapped[int]
    device: Mapped[str | None]
    created_at: Mapped[datetime]
    launched_at: Mapped[datetime | None]  # the cluster took it
    started_at: Mapped[datetime | None]  # every rank training
    stop_at: Mapped[datetime | None]  # when the stop was sent
    kill_at: Mapped[datetime | None]  # when the kill was last sent
    ended_at: Mapped[datetime | None]
    released_at: Mapped[datetime | None]
    resume_step: Mapped[int | None]
    resume_checkpoint: Mapped[str | None] = mapped_column(Uuid)
    first_step: Mapped[int | None]
    last_step: Mapped[int | None]
    last_step_at: Mapped[datetime | None]
    last_report_at: Mapped[datetime | None]
    digest: Mapped[str | None]
    saving_step: Mapped[int | None]  # of the save that rank 0 has begun and not ended
    saving_since: Mapped[datetime | None]
    token_hash: Mapped[str | None]  # of the report token
    plan_memory: Mapped[list[dict[str, int]] | None] = mapped_column(Json)
    plan_traffic: Mapped[list[dict[str, int]] | None] = mapped_column(Json)
    parameters: Mapped[int | None]
    log_bytes: Mapped[int] = mapped_column(default=0)  # kept
    log_dropped_bytes: Mapped[int] = mapped_column(default=0)

    __table_args__ = (
        UniqueConstraint("job_id", "number"),
        CheckConstraint(sql_check_attempt(), name="status"),
        Index(None, "status"),
    )


class RankRow(Base):
    """One rank of an attempt as last reported or observed."""

    __tablename__ = "ranks"

    attempt_id: Mapped[str] = mapped_column(Uuid, ForeignKey("attempts.id", ondelete="CASCADE"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(default="starting")
    phase: Mapped[str | None]
    phase_at: Mapped[datetime | None]
    node: Mapped[str | None]
    pid: Mapped[int | None]
    start_ticks: Mapped[int | None]
    step: Mapped[int] = mapped_column(default=0)
    heartbeat_at: Mapped[datetime | None]
    result: Mapped[dict[str, Any] | None] = mapped_column(Json)  # ResultRecord


class ReportSeq(Base):
    """Highest batch applied for an (attempt, rank)."""

    __tablename__ = "reports"

    attempt_id: Mapped[str] = mapped_column(Uuid, ForeignKey("attempts.id", ondelete="CASCADE"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    seq: Mapped[int]
    closed: Mapped[bool] = mapped_column(default=False)
    updated_at: Mapped[datetime]
