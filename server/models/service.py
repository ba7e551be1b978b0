"""What servers share: leases, the nodes as last seen, the feed of changes."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from server.models.columns import Base, BigKey, Json, Uuid


class Lease(Base):
    """A right that expires; `epoch` grows with every new holder."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str]
    epoch: Mapped[int]
    expires_at: Mapped[datetime]


class NodeRow(Base):
    """A machine of the cluster as the controller last saw it."""

    __tablename__ = "nodes"

    id: Mapped[str] = mapped_column(primary_key=True)
    address: Mapped[str]
    alive: Mapped[bool]
    device: Mapped[str]
    slots: Mapped[int]
    free_slots: Mapped[int]
    memory_bytes: Mapped[int]
    device_memory_bytes: Mapped[int]
    devices: Mapped[list[str]] = mapped_column(Json)
    seen_at: Mapped[datetime]


class Change(Base):
    """One line of the feed, written in the transaction that made the change; old ones are pruned."""

    __tablename__ = "changes"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    topic: Mapped[str] = mapped_column(String(16))
    job_id: Mapped[str | None] = mapped_column(Uuid)
    at: Mapped[datetime]

    __table_args__ = ({"sqlite_autoincrement": True},)
