"""The database, table by table, as SQLAlchemy declarative classes used with Core statements.

Rules: times are aware UTC; ids of things people name are UUIDv7 made by us; a point is keyed by an integer, never by
text; a non-finite value is a null with a flag. Rows of these classes stay inside `server/rows/`; only `db.py` commits.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from server.states import sql_check, sql_check_attempt, sql_check_desired

# values of `flag` columns: what a null value was
FINITE, NAN, POSITIVE_INFINITY, NEGATIVE_INFINITY = 0, 1, 2, 3


class UtcTime(TypeDecorator[datetime]):
    """An aware UTC time on every database; a naive one is refused."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        assert value.tzinfo is not None, f"naive time {value}"
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Json(TypeDecorator[Any]):
    """A JSON value as text: the same bytes on every database; NaN is refused; None is SQL's null."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(value, allow_nan=False, separators=(",", ":"))

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


Uuid = String(36)
BigKey = BigInteger().with_variant(Integer, "sqlite")  # SQLite gives row numbers to INTEGER keys only


class Base(DeclarativeBase):
    """Base of every table."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {datetime: UtcTime, str: Text, int: BigInteger, float: Float(53), bool: Boolean}  # noqa: RUF012


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
    plan: Mapped[dict[str, Any] | None] = mapped_column(Json)  # PlanView at submit
    cloned_from: Mapped[str | None] = mapped_column(Uuid)

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
    resume_checkpoint: Mapped[str | None] = mapped_column(Uuid)  # named by a person; None: the newest verified

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


class ReportSeq(Base):
    """Highest batch applied for an (attempt, rank)."""

    __tablename__ = "reports"

    attempt_id: Mapped[str] = mapped_column(Uuid, ForeignKey("attempts.id", ondelete="CASCADE"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    seq: Mapped[int]
    closed: Mapped[bool] = mapped_column(default=False)
    updated_at: Mapped[datetime]


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
    pinned: Mapped[bool] = mapped_column(default=False)
    created_at: Mapped[datetime]

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


class User(Base):
    """A person or a program with a role."""

    __tablename__ = "users"

    id: Mapped[str] = mapped_column(Uuid, primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    role: Mapped[str]
    created_at: Mapped[datetime]


class Token(Base):
    """A secret of a user, by its SHA-256; `session` tokens live in a browser's cookie."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(Uuid, primary_key=True)
    user_id: Mapped[str] = mapped_column(Uuid, ForeignKey("users.id", ondelete="CASCADE"), index=True)
    hash: Mapped[str] = mapped_column(String(64), unique=True)
    kind: Mapped[str]  # api, session
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]


class IdempotencyKey(Base):
    """The job a key made, written in the job's own transaction."""

    __tablename__ = "idempotency_keys"

    owner: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    body_hash: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str] = mapped_column(Uuid, ForeignKey("jobs.id", ondelete="CASCADE"))
    created_at: Mapped[datetime]


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


class PlanRequest(Base):
    """A plan of a user's model, made in a rank process."""

    __tablename__ = "plan_requests"

    id: Mapped[str] = mapped_column(Uuid, primary_key=True)
    owner: Mapped[str]
    spec: Mapped[dict[str, Any]] = mapped_column(Json)
    status: Mapped[str]  # pending, done, failed
    result: Mapped[dict[str, Any] | None] = mapped_column(Json)
    error: Mapped[str | None]
    created_at: Mapped[datetime]


class Change(Base):
    """One line of the feed, written in the transaction that made the change; old ones are pruned."""

    __tablename__ = "changes"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    topic: Mapped[str] = mapped_column(String(16))
    job_id: Mapped[str | None] = mapped_column(Uuid)
    at: Mapped[datetime]

    __table_args__ = ({"sqlite_autoincrement": True},)
