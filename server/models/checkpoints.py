"""Published checkpoints and the file of each rank."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, Index, SmallInteger, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from server.models.columns import FINITE, Base, Json, Uuid


class Checkpoint(Base):
    """A published checkpoint; without a manifest there is no row."""

    __tablename__ = "checkpoints"

    id: Mapped[str] = mapped_column(Uuid, primary_key=True)
    job_id: Mapped[str] = mapped_column(Uuid, ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    step: Mapped[int]
    folder: Mapped[str]
    status: Mapped[str]  # complete, verified, corrupt, deleted
    problem: Mapped[str | None]
    ranks: Mapped[int]
    stage: Mapped[int]
    bytes: Mapped[int]
    digest: Mapped[str]
    eval_loss: Mapped[float | None]
    eval_loss_flag: Mapped[int] = mapped_column(SmallInteger, default=FINITE)
    seconds: Mapped[float]
    seconds_by: Mapped[dict[str, float] | None] = mapped_column(Json)  # part of the save -> seconds
    pinned: Mapped[bool] = mapped_column(default=False)
    created_at: Mapped[datetime]
    verified_at: Mapped[datetime | None]  # when every byte was last read back

    __table_args__ = (UniqueConstraint("job_id", "folder"), Index(None, "job_id", "step"))


class CheckpointShard(Base):
    """One rank's file of a checkpoint."""

    __tablename__ = "checkpoint_shards"

    checkpoint_id: Mapped[str] = mapped_column(Uuid, ForeignKey("checkpoints.id", ondelete="CASCADE"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    file: Mapped[str]
    bytes: Mapped[int]
    checksum: Mapped[str]
    status: Mapped[str] = mapped_column(default="ok")
    verified_at: Mapped[datetime | None]  # a reading that was cut short goes on behind the shards that have it
