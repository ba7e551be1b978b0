"""What the server and the processes that train say to each other. Pydantic only: no ray, no torch.

A `LaunchOrder` goes down to each rank; `Record`s come up. A rank appends records to its spool file, one JSON object per
line; its actor reads the spool and sends numbered `ReportBatch`es. (attempt, rank, seq) is applied once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, NewType

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, TypeAdapter

from workers.spec import JobSpec, ZeroSpec

JobId = NewType("JobId", str)  # UUIDv7
AttemptId = NewType("AttemptId", str)  # UUIDv7
Rank = NewType("Rank", int)

ORDER_FILE = "order.json"  # LaunchOrder of this rank, in its folder
SPOOL_FILE = "spool.jsonl"  # one Record per line, append only
OUTPUT_FILE = "output.log"  # stdout and stderr of the rank, raw bytes
DISK_EXIT = 74  # exit code (EX_IOERR) of a rank that could not write how it ended
RESULT_FILE = "result.json"  # ResultRecord, written atomically before the rank exits
STOP_FILE = "stop"  # its presence asks the rank to checkpoint and leave at the next step boundary
EVAL_LOSS = "eval_loss"  # in a manifest's progress: the validation loss of its step, where it was measured
ENVIRONMENT_MARK = "SHARDYARD_ATTEMPT"  # inherited by every child of a rank: attempt id

_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _read_number(value: Any) -> Any:
    return _NAMES.get(value, value) if isinstance(value, str) else value


def write_number(value: float) -> float | str:
    """A float as JSON carries it: NaN and the infinities as the strings "NaN", "Infinity", "-Infinity"."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def eval_loss_of(extra: Mapping[str, Any]) -> float | None:
    """The validation loss in the `extra` of a manifest's progress, when it was measured."""
    value = _read_number(extra.get(EVAL_LOSS))
    return None if value is None else float(value)


Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Number = Annotated[
    float, BeforeValidator(_read_number), PlainSerializer(write_number, return_type=float | str, when_used="json")
]


class Message(BaseModel):
    """Base of every message: frozen; unknown fields refused, so that a version skew is seen."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class ResumeFrom(Message):
    """The checkpoint an attempt starts from."""

    checkpoint: str  # folder name in the job's store
    step: Annotated[int, Field(ge=0)]
    store_url: str | None = None  # of the job that wrote it, when a fork begins; None: the order's own


class LaunchOrder(Message):
    """Everything one rank needs, and nothing it may choose. Written to ORDER_FILE by its actor."""

    job_id: JobId
    attempt_id: AttemptId
    fence: Annotated[int, Field(ge=1)]  # attempt number of the job
    rank: Rank
    world_size: Annotated[int, Field(ge=1)]
    master_addr: str
    master_port: int
    device: Literal["cpu", "cuda"]
    spec: JobSpec  # with zero.stage a number
    chunk: Annotated[int, Field(ge=1)]  # C, fixed at submit
    rank_folder: str  # absolute; spool, output and result live here
    cache_folder: str  # absolute; tokenizer and token files, shared by the jobs of a node
    store_url: str  # absolute folder or s3://...; the job's checkpoints live below it
    resume: ResumeFrom | None = None
    until: Annotated[int, Field(ge=1)] | None = None  # leave after this step as if asked to stop; None: the last one
    digest_every: Annotated[int, Field(ge=0)] = 0  # 0: only after the last step
    retains: bool = False  # rank 0 removes checkpoints beyond keep_latest; under a service the server does
    sample_seconds: Annotated[float, Field(ge=0.0)] = 0.5  # between memory and ledger records; 0: at every step


class PhaseRecord(Message):
    """The rank entered a phase of its life."""

    kind: Literal["phase"] = "phase"
    at: AwareDatetime
    phase: Literal["started", "preparing", "joining", "building", "restoring", "training", "saving", "finished"]


class PointsRecord(Message):
    """Values of named series at one step. Sent by rank 0 unless a series belongs to a rank."""

    kind: Literal["points"] = "points"
    at: AwareDatetime
    step: Annotated[int, Field(ge=0)]
    values: dict[
        str, Number
    ]  # loss, grad_norm, lr, tokens_per_second, seconds, seconds/forward, bytes_sent, eval_loss, ...


class MemoryRecord(Message):
    """Bytes of one rank by category, at the peak within the step."""

    kind: Literal["memory"] = "memory"
    at: AwareDatetime
    step: Annotated[int, Field(ge=0)]
    phase: Literal["rest", "forward", "backward", "reduce", "update", "gather", "peak"] = "peak"
    params: int = 0
    grads: int = 0
    sums: int = 0
    master: int = 0
    moments: int = 0
    buckets: int = 0
    slots: int = 0
    pinned: int = 0  # host memory of an offloaded update
    activations: int = 0  # whatever else the step allocated
    other: int = 0
    allocated: int = 0
    reserved: int = 0
    rss: int = 0


class LogRecord(Message):
    """A piece of a rank's output, decoded as UTF-8 with replacement."""

    kind: Literal["log"] = "log"
    at: AwareDatetime
    stream: Literal["stdout", "stderr", "shardyard"]
    text: str


class ShardRecord(Message):
    """One rank's file of a checkpoint."""

    rank: Annotated[int, Field(ge=0)]
    file: str
    bytes: Annotated[int, Field(ge=0)]
    checksum: str


class CheckpointRecord(Message):
    """A manifest was published: from now on the checkpoint exists."""

    kind: Literal["checkpoint"] = "checkpoint"
    at: AwareDatetime
    step: Annotated[int, Field(ge=0)]
    folder: str
    digest: str
    ranks: Annotated[int, Field(ge=1)]
    stage: Annotated[int, Field(ge=0, le=3)]
    shards: list[ShardRecord]
    seconds: float
    seconds_by: dict[str, Seconds] = {}  # copy, write (hash, write, sync), publish; blocked: training waited meanwhile
    eval_loss: Number | None = None


class SaveRecord(Message):
    """Rank 0 began to save a step, or that save has ended, however it did."""

    kind: Literal["save"] = "save"
    at: AwareDatetime
    step: Annotated[int, Field(ge=0)]
    state: Literal["begun", "ended"]


class PlanRecord(Message):
    """The plan of this attempt as the engine computed it (bytes by category per rank, bytes per step by purpose)."""

    kind: Literal["plan"] = "plan"
    at: AwareDatetime
    memory: list[dict[str, int]]  # index: rank
    traffic: list[dict[str, int]]  # index: rank
    parameters: int
    stage: int
    chunk: int


class LedgerRecord(Message):
    """Measured traffic of one step on one rank, beside the plan."""

    kind: Literal["ledger"] = "ledger"
    at: AwareDatetime
    step: int
    bytes: dict[str, int]  # purpose -> payload bytes sent
    seconds: dict[str, float]  # purpose -> seconds


class AliveRecord(Message):
    """The rank lives, whatever it computes or waits for: no progress, but no silence either."""

    kind: Literal["alive"] = "alive"
    at: AwareDatetime


class EventRecord(Message):
    """Something a person should know: a checkpoint refused, evaluation off, a non-finite step skipped."""

    kind: Literal["event"] = "event"
    at: AwareDatetime
    action: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.]*$")]
    message: str
    data: dict[str, Any] = {}


class ErrorInfo(Message):
    """An exception as the first failing rank saw it."""

    type: str
    message: str
    traceback: str
    code: str | None = None  # stable code of our own error classes


class ResultRecord(Message):
    """How a rank ended; also the content of RESULT_FILE."""

    kind: Literal["result"] = "result"
    at: AwareDatetime
    outcome: Literal[
        "finished", "stopped", "failed", "died"
    ]  # stopped: by the stop flag, after a checkpoint; died: no word from it
    step: Annotated[int, Field(ge=0)] = 0
    digest: str | None = None
    error: ErrorInfo | None = None
    exit_code: int | None = None
    signal: int | None = None
    peak_rss: int | None = None


Record = Annotated[
    PhaseRecord
    | PointsRecord
    | MemoryRecord
    | LogRecord
    | CheckpointRecord
    | SaveRecord
    | PlanRecord
    | LedgerRecord
    | AliveRecord
    | EventRecord
    | ResultRecord,
    Field(discriminator="kind"),
]
RECORD: TypeAdapter[Record] = TypeAdapter(Record)


class ReportBatch(Message):
    """Records seq by seq: batch n of an (attempt, rank) is sent until acknowledged, then n + 1."""

    attempt_id: AttemptId
    fence: int
    rank: Rank
    seq: Annotated[int, Field(ge=1)]
    records: Annotated[list[Record], Field(max_length=5000)]
    closed: bool = False  # the spool is drained and the rank has ended


class ReportReply(Message):
    """The highest seq applied for this (attempt, rank); the sender goes on from there."""

    applied_seq: int


class ResumeRequest(Message):
    """Body of POST /v1/jobs/{id}/resume."""

    checkpoint: str | None = None  # checkpoint id; None: the newest usable one
    ranks: Annotated[int, Field(strict=True, ge=1, le=65536)] | None = None
    zero: ZeroSpec | None = None
    train: ResumeTrain | None = None


class ResumeTrain(Message):
    """The part of `train` a resume may change."""

    steps: Annotated[int, Field(strict=True, ge=1, le=2**53)]


def record_time(record: Record) -> datetime:
    """When the record was made, aware UTC."""
    return record.at


ResumeRequest.model_rebuild()
