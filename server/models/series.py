"""Numbers over steps: a series, its open tail, its sealed chunks and their rollups."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, LargeBinary, SmallInteger, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from server.models.columns import FINITE, Base, BigKey, Uuid


class Series(Base):
    """A named line of one attempt and rank; its integer keys the points."""

    __tablename__ = "series"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(Uuid, ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    attempt_id: Mapped[str] = mapped_column(Uuid, ForeignKey("attempts.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    rank: Mapped[int]
    name: Mapped[str]

    __table_args__ = (UniqueConstraint("attempt_id", "name", "rank"),)


class SeriesStats(Base):
    """A series in numbers, kept with every report; lists read this and nothing else."""

    __tablename__ = "series_stats"

    series_id: Mapped[int] = mapped_column(BigKey, ForeignKey("series.id", ondelete="CASCADE"), primary_key=True)
    num_chunks: Mapped[int] = mapped_column(default=0)
    tail_count: Mapped[int] = mapped_column(default=0)  # at most so many points in the tail
    count: Mapped[int] = mapped_column(default=0)
    non_finite: Mapped[int] = mapped_column(default=0)
    out_of_order: Mapped[int] = mapped_column(default=0)
    first_step: Mapped[int | None]
    last_step: Mapped[int | None]
    last: Mapped[float | None]
    last_flag: Mapped[int] = mapped_column(SmallInteger, default=FINITE)
    min: Mapped[float | None]
    max: Mapped[float | None]


class PointTail(Base):
    """The open end of a series, one row per step, until 512 of them are sealed into a chunk."""

    __tablename__ = "point_tail"

    series_id: Mapped[int] = mapped_column(BigKey, ForeignKey("series.id", ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    at_us: Mapped[int]  # microseconds since 1970, UTC
    value: Mapped[float | None]
    flag: Mapped[int] = mapped_column(SmallInteger)


class PointChunk(Base):
    """512 points of a series, sorted by step; see `points.py` for the bytes. A later chunk wins over an earlier one."""

    __tablename__ = "point_chunk"

    series_id: Mapped[int] = mapped_column(BigKey, ForeignKey("series.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    first_step: Mapped[int]
    last_step: Mapped[int]
    count: Mapped[int]
    points: Mapped[bytes] = mapped_column(LargeBinary)

    __table_args__ = (Index(None, "series_id", "last_step"),)


class Rollup(Base):
    """16**level steps of the sealed part of a series, anchored at step 0: bucket = step // 16**level."""

    __tablename__ = "rollup"

    series_id: Mapped[int] = mapped_column(BigKey, ForeignKey("series.id", ondelete="CASCADE"), primary_key=True)
    level: Mapped[int] = mapped_column(SmallInteger, primary_key=True)
    bucket: Mapped[int] = mapped_column(primary_key=True)
    first_step: Mapped[int]
    last_step: Mapped[int]
    last_at_us: Mapped[int]
    count: Mapped[int]  # finite and non-finite
    nan: Mapped[int]
    positive_infinity: Mapped[int]
    negative_infinity: Mapped[int]
    min: Mapped[float | None]
    max: Mapped[float | None]
    first: Mapped[float | None]  # of the finite values
    last: Mapped[float | None]
    sum: Mapped[float | None]  # None: beyond what a float holds
