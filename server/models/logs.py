"""Output of ranks: chunks of finished lines, and the line that is being written."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from server.models.columns import Base, Json, Uuid


class LogChunk(Base):
    """Consecutive lines of one rank. `text` is the lines joined by newlines, `meta` one [at_us, stream, split] each."""

    __tablename__ = "log_chunk"

    job_id: Mapped[str] = mapped_column(Uuid, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    first_seq: Mapped[int] = mapped_column(primary_key=True)
    last_seq: Mapped[int]
    attempt_id: Mapped[str] = mapped_column(Uuid, ForeignKey("attempts.id", ondelete="CASCADE"), index=True)
    attempt: Mapped[int]
    rank: Mapped[int]
    num_bytes: Mapped[int]
    text: Mapped[str]
    meta: Mapped[list[Any]] = mapped_column(Json)

    __table_args__ = (Index(None, "job_id", "rank", "first_seq"),)


class LogOpenLine(Base):
    """The line a rank is writing now (a progress bar), and the state of its cleaner."""

    __tablename__ = "log_open_line"

    attempt_id: Mapped[str] = mapped_column(Uuid, ForeignKey("attempts.id", ondelete="CASCADE"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    stream: Mapped[str] = mapped_column(String(16), primary_key=True)
    at: Mapped[datetime]
    text: Mapped[str]
    carriage_return: Mapped[bool]
    escape: Mapped[str]  # an escape sequence that is not yet complete
