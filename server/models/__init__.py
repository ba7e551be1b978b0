"""The database, table by table, as SQLAlchemy declarative classes used with Core statements.

Read `jobs.py` and `attempts.py` first; the rest hangs below them. Rules: times are aware UTC; ids of things people name
are UUIDv7 made by us; a point is keyed by an integer, never by text; a non-finite value is a null with a flag. Rows of
these classes stay inside `server/rows/`; only `db.py` commits. Imports nothing of `server` but the states.
"""

from __future__ import annotations

from server.models.attempts import Attempt, RankRow, ReportSeq
from server.models.checkpoints import Checkpoint, CheckpointShard
from server.models.columns import FINITE, NAN, NEGATIVE_INFINITY, POSITIVE_INFINITY, Base, BigKey, Json, UtcTime, Uuid
from server.models.jobs import Event, IdempotencyKey, Job, JobTag, PlanRequest
from server.models.logs import LogChunk, LogOpenLine
from server.models.measured import Ledger, MemorySample
from server.models.series import PointChunk, PointTail, Rollup, Series, SeriesStats
from server.models.service import Change, Lease, NodeRow
from server.models.users import Token, User

__all__ = [
    "FINITE",
    "NAN",
    "NEGATIVE_INFINITY",
    "POSITIVE_INFINITY",
    "Attempt",
    "Base",
    "BigKey",
    "Change",
    "Checkpoint",
    "CheckpointShard",
    "Event",
    "IdempotencyKey",
    "Job",
    "JobTag",
    "Json",
    "Lease",
    "Ledger",
    "LogChunk",
    "LogOpenLine",
    "MemorySample",
    "NodeRow",
    "PlanRequest",
    "PointChunk",
    "PointTail",
    "RankRow",
    "ReportSeq",
    "Rollup",
    "Series",
    "SeriesStats",
    "Token",
    "User",
    "UtcTime",
    "Uuid",
]
