"""What the controller may do next: the output of `scheduler.plan`, applied by the reconciler in this order."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from server.states import Status
from workers.contract import AttemptId, JobId

Data = dict[str, object]


@dataclass(frozen=True)
class Adopt:
    """Tell the actors of a living attempt where this server listens."""

    attempt_id: AttemptId


@dataclass(frozen=True)
class MarkRunning:
    """Every rank trains: the job is running."""

    job_id: JobId
    attempt_id: AttemptId


@dataclass(frozen=True)
class MarkStopping:
    """A live job whose stop was asked for, but that is not yet `stopping`."""

    job_id: JobId
    attempt_id: AttemptId


@dataclass(frozen=True)
class Stop:
    """Ask all ranks to checkpoint and leave at the next step boundary."""

    attempt_id: AttemptId


@dataclass(frozen=True)
class Decide:
    """The attempt's end is known: write its reason, which nothing changes afterwards."""

    attempt_id: AttemptId
    reason: str
    data: Data = field(default_factory=dict)
    error: Data | None = None  # the exception of the first failing rank


@dataclass(frozen=True)
class Kill:
    """Kill every process of the attempt."""

    attempt_id: AttemptId


@dataclass(frozen=True)
class Finish:
    """Release the attempt, see it gone, then move the job: `status`, or back to the queue when `status` is queued."""

    job_id: JobId
    attempt_id: AttemptId
    status: Status
    reason: str
    data: Data = field(default_factory=dict)
    user_failures: int = 0
    infrastructure_failures: int = 0
    progress_step: int = 0
    not_before: datetime | None = None


@dataclass(frozen=True)
class Sweep:
    """Kill and release an attempt that the database does not know, or has as released."""

    attempt_id: AttemptId
    job_id: JobId


@dataclass(frozen=True)
class Start:
    """Launch a job's next attempt on a kind of device."""

    job_id: JobId
    device: str  # cpu or cuda
    slot_memory_bytes: int | None = None  # of the smallest slot; None: not known
    one_node: bool = True


@dataclass(frozen=True)
class Explain:
    """Store why a job waits, or that it is out of sight. Emitted only when it changed."""

    job_id: JobId
    status: Status
    reason: str
    data: Data = field(default_factory=dict)


@dataclass(frozen=True)
class Delete:
    """Remove a job's files, then its rows."""

    job_id: JobId


Command = Adopt | MarkRunning | MarkStopping | Stop | Decide | Kill | Finish | Sweep | Start | Explain | Delete
