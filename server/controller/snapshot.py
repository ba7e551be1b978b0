"""What the controller knows at one moment, as frozen values: the input of `scheduler.plan`.

Facts of the database and of the cluster stand side by side and are never mixed: a rank's phase was reported, its status
was observed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from server.controller.cluster import ClusterState
from server.states import AttemptStatus, Desired, Status
from workers.contract import AttemptId, JobId, ResultRecord


@dataclass(frozen=True)
class JobFacts:
    """A job that is queued, live or being deleted."""

    id: JobId
    status: Status
    desired: Desired
    priority: int  # 0 to 100, higher first
    queued_at: datetime  # of the submit or the resume; a retry keeps it
    ranks: int
    device: str  # auto, cpu or cuda, as the spec says
    stop_grace_seconds: float
    steps: int = 0
    fence: int = 0  # number of the newest attempt
    reason: str | None = None
    reason_data: dict[str, object] = field(default_factory=dict)
    not_before: datetime | None = None  # back-off
    needs_plan: bool = False  # its stage is taken from a plan that is being made
    desired_at: datetime | None = None
    user_failures: int = 0  # since the last progress
    infrastructure_failures: int = 0
    user_budget: int = 0
    infrastructure_budget: int = 0
    progress_step: int = 0  # step of the newest checkpoint when a failure was last counted
    checkpoint_step: int = 0  # what a resume would begin from, known once an attempt ends; 0: the beginning


@dataclass(frozen=True)
class RankFacts:
    """What one rank has reported."""

    rank: int
    phase: str | None = None  # None: no word yet
    phase_at: datetime | None = None
    step: int = 0
    result: ResultRecord | None = None
    closed: bool = False  # its last report has been applied
    node: str | None = None


@dataclass(frozen=True)
class AttemptFacts:
    """An attempt that is not yet released."""

    id: AttemptId
    job_id: JobId
    fence: int
    status: AttemptStatus
    device: str  # cpu or cuda
    created_at: datetime
    ranks: tuple[RankFacts, ...]
    reason: str | None = None  # decided; not None: only the release is left
    reason_data: dict[str, object] = field(default_factory=dict)
    launched_at: datetime | None = None
    started_at: datetime | None = None  # training
    stop_at: datetime | None = None  # when the stop was sent
    kill_at: datetime | None = None
    ended_at: datetime | None = None  # when the reason was decided
    last_step_at: datetime | None = None


@dataclass(frozen=True)
class Policy:
    """The settings that decisions depend on."""

    start_deadline_seconds: float = 120.0
    save_deadline_seconds: float = 300.0
    no_progress_seconds: float = 1800.0
    unreachable_seconds: float = 30.0
    lost_seconds: float = 5.0
    sweep_seconds: float = 30.0
    drain_seconds: float = 10.0
    culprit_seconds: float = 3.0
    quota_slots: int = 0
    first_backoff_seconds: float = 1.0
    last_backoff_seconds: float = 60.0


@dataclass(frozen=True)
class Snapshot:
    """One look at the database and, when it answered, at the cluster."""

    jobs: tuple[JobFacts, ...]
    attempts: tuple[AttemptFacts, ...]
    cluster: ClusterState | None  # None: it did not answer
    cluster_error: str = ""
    policy: Policy = Policy()
    draining: bool = False  # the server is stopping: nothing starts
    launching: frozenset[AttemptId] = frozenset()  # a launch by this controller is on its way
    adopted: frozenset[AttemptId] = frozenset()  # told where this server listens
    absent_since: dict[AttemptId, datetime] = field(default_factory=dict)  # launched, and not seen on the cluster
    unknown_since: dict[AttemptId, datetime] = field(default_factory=dict)  # on the cluster, and not in the database
