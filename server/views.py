"""What the REST API answers: one frozen pydantic model per resource.

Units stand in the names. A number that may be NaN or infinite travels as `Number`: JSON carries "NaN", "Infinity" and
"-Infinity" as strings. Times are aware UTC. ORM rows never leave `server/rows/`; rows make these views.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from server.states import Action, AttemptStatus, Desired, Status
from workers.contract import Number

Role = Literal["admin", "member", "viewer"]
Topic = Literal["job", "metrics", "memory", "ledger", "logs", "checkpoints", "events", "queue", "nodes"]


class View(BaseModel):
    """Base of every answer: frozen, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


Item = TypeVar("Item")


class Page(View, Generic[Item]):
    """One page of a list; `next_cursor` is opaque and None at the end."""

    items: list[Item]
    next_cursor: str | None = None


class FieldProblem(View):
    """One thing wrong with the request, where it stands and what would be right."""

    pointer: str = Field(
        description="RFC 6901 pointer into the body, or the name of a query parameter",
        examples=["/train/learning_rate"],
    )
    message: str
    value: str | None = Field(default=None, description="what was sent, shortened")
    suggestion: str | None = None
    line: int | None = Field(default=None, description="1-based, when the body was YAML")
    column: int | None = Field(default=None, description="1-based, when the body was YAML")


class Problem(View):
    """RFC 9457 problem details; every answer of 400 and above carries one as application/problem+json."""

    type: str = Field(default="about:blank", examples=["urn:shardyard:problem:invalid_spec"])
    title: str
    status: int
    detail: str
    code: str = Field(description="stable name of the kind of error", examples=["invalid_spec", "illegal_action"])
    instance: str | None = None
    errors: list[FieldProblem] = []
    job_status: Status | None = Field(default=None, description="present state, when an action was impossible")
    allowed_actions: list[Action] | None = Field(default=None, description="what the present state allows")


class ReasonView(View):
    """Why a job or attempt is in its state: a stable code and the sentence shown to people."""

    code: str = Field(examples=["no_capacity"])
    sentence: str


class MeView(View):
    """Who the presented token belongs to."""

    name: str
    role: Role


class JobListItem(View):
    """One row of the jobs table; everything comes from summary rows, never from points."""

    id: str
    name: str
    tags: list[str]
    owner: str
    status: Status
    desired: Desired
    reason: ReasonView | None
    priority: int
    version: int = Field(description="grows with every change; the ETag for If-Match")
    created_at: AwareDatetime
    started_at: AwareDatetime | None = Field(description="first attempt's launch")
    ended_at: AwareDatetime | None
    phase: str | None = Field(description="phase of the slowest rank of the running attempt", examples=["training"])
    step: int = Field(description="last completed optimizer step")
    steps: int = Field(description="steps asked for")
    loss: Number | None
    sparkline: list[float | None] = Field(
        description="at most 40 values of the loss, evenly over the steps; null: non-finite or absent"
    )
    ranks: int
    stage: int | None = Field(description="None: auto, not yet decided")
    attempt: int = Field(description="number of the newest attempt, 0 before the first")
    model_kind: str
    eta_seconds: float | None
    last_report_at: AwareDatetime | None = Field(description="last sign of life of the running attempt")
    allowed_actions: list[Action]


class JobPage(Page[JobListItem]):
    """A page of jobs, with how many jobs there are per status under the same filters but the status itself."""

    counts: dict[str, int]


class RankView(View):
    """One rank of an attempt as last seen."""

    rank: int
    status: Literal["starting", "running", "exited", "lost"]
    phase: str | None
    node: str | None
    pid: int | None
    step: int
    heartbeat_age_seconds: float | None
    exit_code: int | None = None
    signal: int | None = None
    peak_rss_bytes: int | None = None


class ErrorView(View):
    """The exception of the first failing rank."""

    rank: int | None
    type: str
    message: str
    traceback: str
    code: str | None = None


class AttemptView(View):
    """One launch of the whole group of ranks; never changed once it has ended."""

    id: str
    number: int = Field(description="also the fence")
    status: AttemptStatus
    reason: ReasonView | None
    error: ErrorView | None
    ranks: int
    stage: int
    device: Literal["cpu", "cuda"] | None
    created_at: AwareDatetime
    started_at: AwareDatetime | None = Field(description="first rank training")
    ended_at: AwareDatetime | None
    resumed_from_step: int | None
    resumed_from_checkpoint: str | None
    first_step: int | None
    last_step: int | None
    digest: str | None
    rank_states: list[RankView]


class JobView(JobListItem):
    """A job with all that its page shows."""

    spec: dict[str, Any]
    spec_yaml: str
    chunk: int = Field(description="C, fixed at submit")
    micro_batches: int = Field(description="V")
    tokens_per_second: Number | None
    digest: str | None = Field(description="16 hex digits after the last digested step")
    cloned_from: str | None
    error: ErrorView | None
    current_attempt: AttemptView | None


class EventView(View):
    """Something that happened to a job; transitions carry old and new."""

    id: int
    job_id: str | None
    attempt: int | None
    rank: int | None
    at: AwareDatetime
    action: str = Field(examples=["job.cancel_requested"])
    actor: str = Field(examples=["user:admin", "controller", "rank:0"])
    cause: str | None
    old: str | None
    new: str | None
    message: str
    data: dict[str, Any]


class PointView(View):
    """A step, or the run of steps that it stands for with their min and max; value None is a gap (non-finite)."""

    step: int
    at: AwareDatetime
    value: Number | None
    min: Number | None
    max: Number | None


class NonFiniteMark(View):
    """A non-finite value at a step."""

    step: int
    value: Number


class SeriesView(View):
    """One line of a chart. The newest attempt's line is the default view; older attempts follow as branches."""

    name: str
    rank: int | None
    attempt: int
    branch: bool = Field(description="true: steps that a newer attempt replaced")
    unit: str | None
    points: list[PointView]
    non_finite: list[NonFiniteMark]
    non_finite_count: int
    count: int = Field(description="raw points in the asked range")
    steps_per_point: int = Field(description="1: raw points; else steps per rollup bucket read")
    error: str | None = Field(default=None, description="this series could not be read; the others can")


class MetricsView(View):
    """Series of a job, each at most about `width` points."""

    job_id: str
    width: int
    series: list[SeriesView]


class SeriesStatsView(View):
    """One series in numbers, without its points."""

    name: str
    rank: int | None
    attempt: int
    unit: str | None
    count: int
    non_finite_count: int
    out_of_order_count: int
    first_step: int | None
    last_step: int | None
    last: Number | None
    min: Number | None
    max: Number | None


class SeriesNamesView(View):
    """Which series a job has."""

    job_id: str
    series: list[SeriesStatsView]


class MemorySampleView(View):
    """Bytes of one rank by category at the peak of a phase."""

    step: int
    attempt: int
    rank: int
    phase: str
    at: AwareDatetime
    params: int
    grads: int
    sums: int
    master: int
    moments: int
    buckets: int
    slots: int
    activations: int
    other: int
    allocated: int
    reserved: int
    rss: int


class StageBytes(View):
    """Bytes per rank of the paper's formula at one stage."""

    stage: int
    bytes: int


class MemoryView(View):
    """Measured memory beside the plan and the paper's lines."""

    job_id: str
    attempt: int | None
    ranks: int
    samples: list[MemorySampleView]
    phases: list[MemorySampleView] = Field(description="newest sample of each rank and phase")
    plan: list[dict[str, int]] = Field(description="index: rank; bytes by category")
    paper: list[StageBytes]


class LedgerEntry(View):
    """One purpose on one rank: planned beside measured."""

    purpose: str
    planned_bytes: int | None
    measured_bytes: int | None
    seconds: float | None


class RankLedger(View):
    """Traffic of one rank in its newest reported step."""

    rank: int
    step: int
    entries: list[LedgerEntry]
    planned_bytes: int
    measured_bytes: int


class LedgerView(View):
    """Traffic against plan."""

    job_id: str
    attempt: int | None
    ranks: list[RankLedger]
    planned_bytes: int = Field(description="all ranks")
    measured_bytes: int = Field(description="all ranks")
    paper_bytes: int | None = Field(description="the paper's volume of gradients and parameters, all ranks")


class LogLine(View):
    """One line of output. `seq` orders the lines of a job."""

    seq: int
    attempt: int
    rank: int
    at: AwareDatetime
    stream: Literal["stdout", "stderr", "shardyard"]
    text: str
    split: bool = Field(default=False, description="the line goes on in the next one: it was too long")
    open: bool = Field(default=False, description="still being written; it may change, and its seq is not final")


class LogView(View):
    """A window of a job's log in time order; without a cursor its tail."""

    items: list[LogLine]
    next_before: int | None = Field(description="pass as before= for older lines; None at the beginning")
    next_after: int | None = Field(description="pass as after= for newer lines")
    dropped_bytes: int = Field(description="output beyond the cap of the attempts, middle dropped")


class CheckpointShardView(View):
    """One rank's file of a checkpoint."""

    rank: int
    file: str
    bytes: int
    checksum: str
    status: Literal["ok", "missing", "corrupt"]


class CheckpointView(View):
    """A published checkpoint."""

    id: str
    job_id: str
    attempt: int
    step: int
    folder: str
    status: Literal["complete", "verified", "corrupt", "deleted"]
    problem: str | None
    ranks: int
    stage: int
    bytes: int
    digest: str
    eval_loss: Number | None
    seconds: float
    pinned: bool
    created_at: AwareDatetime
    shards: list[CheckpointShardView]


class StagePlan(View):
    """The plan of one ZeRO stage."""

    stage: int
    fits: bool
    memory: dict[str, int] = Field(description="bytes by category of the largest rank")
    total_bytes: int
    traffic: dict[str, int] = Field(description="bytes a step by collective/purpose, busiest rank")
    total_traffic_bytes: int
    paper_bytes: int
    paper_traffic_bytes: int
    saving: float = Field(description="1 - total / total of stage 0")
    communication_seconds: float | None = Field(default=None, description="a step's traffic at the link's speed")


class PlanView(View):
    """What a spec would cost, before launch."""

    ranks: int
    micro_batches: int
    chunk: int
    parameters: int
    padded_parameters: int
    exact: bool = Field(description="false: the vocabulary or the user's model is not known before the start")
    device_memory_bytes: int | None = Field(description="of one rank's device; None: not known, everything fits")
    activation_bytes: int | None = Field(description="estimate for one micro-batch; not owned by the engine")
    advised_stage: int
    advice: str
    fits: bool
    idle_share: float = Field(description="share of rank time idle because V is not divisible by ranks")
    note: str | None = Field(default=None, description="what the spec would need for this many ranks")
    link_gbps: float | None = None
    stages: list[StagePlan]


class PendingPlan(View):
    """A user's model is planned in a rank process: fetch the result later."""

    id: str
    status: Literal["pending", "done", "failed"]
    href: str
    plan: PlanView | None = None
    error: str | None = None


class JobPlanView(View):
    """The plan of a job: predicted at submit, and as the engine of the newest attempt computed it."""

    job_id: str
    predicted: PlanView | None
    attempt: int | None
    memory: list[dict[str, int]] = Field(description="index: rank; bytes by category, from the engine")
    traffic: list[dict[str, int]] = Field(description="index: rank; bytes by purpose, from the engine")
    stage: int | None
    chunk: int
    parameters: int | None


class ExplainView(View):
    """Why a job is where it is, and what would move it."""

    job_id: str
    status: Status
    reason: ReasonView | None
    sentence: str
    unblock: str | None
    position: int | None = Field(description="1-based place in the queue")
    jobs_ahead: list[str]
    requested_slots: int
    free_slots: int
    total_slots: int
    max_ranks: int


class Holder(View):
    """A rank that holds a slot."""

    job_id: str
    job_name: str
    attempt: int
    rank: int


class NodeView(View):
    """One machine of the cluster as last seen."""

    id: str
    address: str
    alive: bool
    device: Literal["cpu", "cuda"]
    slots: int
    free_slots: int
    memory_bytes: int
    device_memory_bytes: int
    devices: list[str]
    seen_at: AwareDatetime
    holders: list[Holder]


class NodesView(View):
    """The cluster."""

    items: list[NodeView]


class QueueItem(View):
    """A job that waits."""

    job_id: str
    name: str
    position: int
    ranks: int
    priority: int
    waiting_since: AwareDatetime
    reason: ReasonView | None
    unblock: str | None


class QueueView(View):
    """The queue in the order of start."""

    items: list[QueueItem]


class ActionResult(View):
    """One job's result of a bulk action."""

    id: str
    ok: bool
    status: Status | None
    error: str | None = None


class BulkResult(View):
    """A result for each job asked for."""

    results: list[ActionResult]


class VerifyResult(View):
    """What reading every byte of a checkpoint found."""

    checkpoint: CheckpointView
    ok: bool
    problems: list[str]


class FeedChange(View):
    """Data of an SSE message of `/v1/feed`: something of this topic changed; fetch what you show."""

    topic: Topic
    job_id: str | None
    version: Annotated[int | None, Field(description="job version after the change, when the topic is job")] = None


class HealthView(View):
    """Liveness or readiness."""

    status: Literal["ok", "unavailable"]
    checks: dict[str, str] = {}
