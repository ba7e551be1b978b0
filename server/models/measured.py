"""What ranks measure beside the numbers of a step: memory by category, traffic by purpose."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from server.models.columns import Base, Json, Uuid


class MemorySample(Base):
    """Bytes of one rank by category at the peak of a phase of a step."""

    __tablename__ = "memory_sample"

    attempt_id: Mapped[str] = mapped_column(Uuid, ForeignKey("attempts.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    phase: Mapped[str] = mapped_column(String(16), primary_key=True)
    at: Mapped[datetime]
    params: Mapped[int]
    grads: Mapped[int]
    sums: Mapped[int]
    master: Mapped[int]
    moments: Mapped[int]
    buckets: Mapped[int]
    slots: Mapped[int]
    pinned: Mapped[int] = mapped_column(server_default="0")
    activations: Mapped[int]
    other: Mapped[int]
    allocated: Mapped[int]
    reserved: Mapped[int]
    rss: Mapped[int]


class Ledger(Base):
    """Newest measured traffic of a rank, by purpose."""

    __tablename__ = "ledger"

    attempt_id: Mapped[str] = mapped_column(Uuid, ForeignKey("attempts.id", ondelete="CASCADE"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int]
    bytes: Mapped[dict[str, int]] = mapped_column(Json)
    seconds: Mapped[dict[str, float]] = mapped_column(Json)
