"""States of a job: one table of edges, and everything else derived from it.

Read `EDGES`, then `decide`; why a job is where it is stands in `reasons.py`. The SQL check, the badges, the buttons,
the diagram in `docs/lifecycle.md` and the guard of every `UPDATE jobs ... WHERE id = ? AND status IN (...)` come from
here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Status(StrEnum):
    """Where a job is."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    DELETING = "deleting"
    DELETE_FAILED = "delete_failed"


class Desired(StrEnum):
    """What a person wants of a job, mildest first. Within one attempt it only rises."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"
    KILL = "kill"

    @property
    def severity(self) -> int:
        """0 for run up to 3 for kill."""
        return list(Desired).index(self)


class Action(StrEnum):
    """What a person can do to a job."""

    CANCEL = "cancel"
    KILL = "kill"
    PAUSE = "pause"
    RESUME = "resume"
    CLONE = "clone"
    DELETE = "delete"


class AttemptStatus(StrEnum):
    """Where an attempt is.

    `released` is written after pids, actors and placement group were seen gone; then the attempt never changes.
    """

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    RELEASED = "released"


@dataclass(frozen=True)
class Edge:
    """One legal change of status. `cause` is the word in the event and in the diagram."""

    old: Status
    new: Status
    cause: str


_S = Status

EDGES: tuple[Edge, ...] = (
    Edge(_S.QUEUED, _S.STARTING, "launched"),
    Edge(_S.QUEUED, _S.PAUSED, "paused"),
    Edge(_S.QUEUED, _S.CANCELLED, "cancelled"),
    Edge(_S.QUEUED, _S.FAILED, "failed"),
    Edge(_S.STARTING, _S.RUNNING, "training"),
    Edge(_S.STARTING, _S.STOPPING, "stop_requested"),
    Edge(_S.STARTING, _S.QUEUED, "retried"),
    Edge(_S.STARTING, _S.FAILED, "failed"),
    Edge(_S.RUNNING, _S.STOPPING, "stop_requested"),
    Edge(_S.RUNNING, _S.QUEUED, "retried"),
    Edge(_S.RUNNING, _S.SUCCEEDED, "finished"),
    Edge(_S.RUNNING, _S.FAILED, "failed"),
    Edge(_S.STOPPING, _S.PAUSED, "paused"),
    Edge(_S.STOPPING, _S.CANCELLED, "cancelled"),
    Edge(_S.STOPPING, _S.SUCCEEDED, "finished"),
    Edge(_S.STOPPING, _S.FAILED, "failed"),
    Edge(_S.STOPPING, _S.QUEUED, "preempted"),
    Edge(_S.PAUSED, _S.QUEUED, "resumed"),
    Edge(_S.PAUSED, _S.CANCELLED, "cancelled"),
    Edge(_S.CANCELLED, _S.QUEUED, "resumed"),
    Edge(_S.FAILED, _S.QUEUED, "resumed"),
    Edge(_S.SUCCEEDED, _S.QUEUED, "resumed"),
    Edge(_S.SUCCEEDED, _S.DELETING, "delete_requested"),
    Edge(_S.FAILED, _S.DELETING, "delete_requested"),
    Edge(_S.CANCELLED, _S.DELETING, "delete_requested"),
    Edge(_S.DELETING, _S.DELETE_FAILED, "delete_failed"),
    Edge(_S.DELETE_FAILED, _S.DELETING, "delete_requested"),
)

NEXT: dict[Status, frozenset[Status]] = {s: frozenset(e.new for e in EDGES if e.old == s) for s in Status}
PREVIOUS: dict[Status, frozenset[Status]] = {s: frozenset(e.old for e in EDGES if e.new == s) for s in Status}
CAUSES: dict[tuple[Status, Status], str] = {(e.old, e.new): e.cause for e in EDGES}

LIVE: frozenset[Status] = PREVIOUS[_S.STOPPING] | {_S.STOPPING}  # an attempt exists: starting, running, stopping
ENDED: frozenset[Status] = PREVIOUS[_S.DELETING] - {_S.DELETE_FAILED}  # succeeded, failed, cancelled
ACTIVE: frozenset[Status] = LIVE | {_S.QUEUED, _S.DELETING}  # the controller has something to do
RESTING: frozenset[Status] = frozenset(Status) - ACTIVE  # nothing happens until a person acts


def is_legal(old: Status, new: Status) -> bool:
    """Whether the table has this edge."""
    return new in NEXT[old]


def sql_check(column: str = "status") -> str:
    """The text of the CHECK constraint on a status column."""
    return _check(column, Status)


def sql_check_desired(column: str = "desired") -> str:
    """The text of the CHECK constraint on a desired column."""
    return _check(column, Desired)


def sql_check_attempt(column: str = "status") -> str:
    """The text of the CHECK constraint on an attempt's status column."""
    return _check(column, AttemptStatus)


def _check(column: str, values: Iterable[StrEnum]) -> str:
    return f"{column} IN ({', '.join(repr(v.value) for v in values)})"


_DESIRED_OF: dict[Action, Desired] = {
    Action.PAUSE: Desired.PAUSE,
    Action.CANCEL: Desired.CANCEL,
    Action.KILL: Desired.KILL,
}
_RESULT_OF: dict[Action, Status] = {Action.PAUSE: _S.PAUSED, Action.CANCEL: _S.CANCELLED, Action.KILL: _S.CANCELLED}


STOP_REASONS: dict[Desired, str] = {
    Desired.PAUSE: "paused_by_user",
    Desired.CANCEL: "cancelled_by_user",
    Desired.KILL: "killed",
}  # codes of reasons.py


@dataclass(frozen=True)
class Decision:
    """What an action does to a job.

    `apply`: write `status`, `desired` and `reason`. `satisfied`: answer the same body, write nothing.
    `impossible`: 409 with the present state and `allowed_actions`.
    """

    verdict: Literal["apply", "satisfied", "impossible"]
    status: Status
    desired: Desired
    reason: str | None = None  # reason code to store with the status


def decide(action: Action, status: Status, desired: Desired) -> Decision:
    """What `action` does to a job in `status` with `desired`. Pure; the caller guards its UPDATE with `status`.

    A live job goes to `stopping` at once and the controller does the rest; a waiting one ends here, without it.
    """
    if action in _DESIRED_OF:
        return _decide_stop(action, status, desired)
    if action is Action.RESUME:
        return _decide_resume(status, desired)
    if action is Action.DELETE:
        return _decide_delete(status, desired)
    return Decision("satisfied", status, desired)  # clone touches nothing of the original


def _decide_stop(action: Action, status: Status, desired: Desired) -> Decision:
    wanted, result = _DESIRED_OF[action], _RESULT_OF[action]
    if status in LIVE:
        if desired.severity >= wanted.severity:
            return Decision("satisfied", status, desired)
        return Decision("apply", _S.STOPPING, wanted, STOP_REASONS[wanted])
    if status is result:
        return Decision("satisfied", status, desired)
    if is_legal(status, result):
        return Decision("apply", result, wanted, STOP_REASONS[wanted])
    return Decision("impossible", status, desired)


def _decide_resume(status: Status, desired: Desired) -> Decision:
    if status in RESTING and is_legal(status, _S.QUEUED):
        return Decision("apply", _S.QUEUED, Desired.RUN, "resumed")
    if desired is Desired.RUN and status in LIVE | {_S.QUEUED}:
        return Decision("satisfied", status, desired)
    return Decision("impossible", status, desired)


def _decide_delete(status: Status, desired: Desired) -> Decision:
    if status is _S.DELETING:
        return Decision("satisfied", status, desired)
    if is_legal(status, _S.DELETING):
        return Decision("apply", _S.DELETING, desired, "delete_requested")
    return Decision("impossible", status, desired)


def allowed_actions(status: Status, desired: Desired) -> tuple[Action, ...]:
    """The buttons of a job: actions that would change something now, and clone."""
    return tuple(a for a in Action if a is Action.CLONE or decide(a, status, desired).verdict == "apply")


def rises(old: Desired, new: Desired) -> bool:
    """Whether `new` may replace `old` within one attempt."""
    return new.severity > old.severity


BADGES: dict[Status, Literal["waiting", "busy", "good", "bad", "calm"]] = {
    _S.QUEUED: "waiting",
    _S.STARTING: "busy",
    _S.RUNNING: "busy",
    _S.STOPPING: "waiting",
    _S.PAUSED: "calm",
    _S.CANCELLED: "calm",
    _S.SUCCEEDED: "good",
    _S.FAILED: "bad",
    _S.DELETING: "waiting",
    _S.DELETE_FAILED: "bad",
}


def diagram() -> str:
    """The table as a Mermaid state diagram, for docs/lifecycle.md."""
    lines = ["stateDiagram-v2", "    [*] --> queued: submitted"]
    lines += [f"    {e.old} --> {e.new}: {e.cause}" for e in EDGES]
    return "\n".join([*lines, "    deleting --> [*]: removed"])
