"""The seam between the controller and whatever runs processes: `Cluster` and its frozen values.

`ray_cluster.py` is the real one, `fake_cluster.py` the one that ships for tests and `--fake`; both pass
`tests/service/cluster_conformance.py`. Every method may block on the network: call it outside a database session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from workers.contract import AttemptId, JobId, LaunchOrder, ResultRecord


@dataclass(frozen=True)
class Node:
    """One machine as the cluster sees it now."""

    id: str
    address: str
    alive: bool
    device: Literal["cpu", "cuda"]
    slots: int  # ranks it can hold
    free_slots: int
    memory_bytes: int
    device_memory_bytes: int  # per slot: of one GPU, or node memory / slots on CPU
    devices: tuple[str, ...] = ()  # GPU UUIDs, each once


@dataclass(frozen=True)
class Launch:
    """An attempt to start, whole or not at all. `orders[i]` is rank i's; the cluster fills in addresses and ports."""

    job_id: JobId
    attempt_id: AttemptId
    fence: int
    orders: tuple[LaunchOrder, ...]
    report_url: str  # where the actors send ReportBatches
    report_token: str  # valid for this attempt only
    orphan_seconds: float


RankStatus = Literal["starting", "running", "exited", "lost"]  # lost: its actor or node is gone


@dataclass(frozen=True)
class RankState:
    """What the cluster knows of one rank now."""

    rank: int
    status: RankStatus
    node_id: str | None = None
    pid: int | None = None
    start_ticks: int | None = None  # of /proc/<pid>/stat, so that a reused pid is not taken for it
    result: ResultRecord | None = None  # when exited
    step: int = 0  # last step seen by its actor
    heartbeat_age_seconds: float = 0.0  # since the actor last saw its rank move
    reports_closed: bool = False  # everything in the spool was acknowledged


@dataclass(frozen=True)
class AttemptState:
    """All that exists of one attempt on the cluster, found by name."""

    attempt_id: AttemptId
    job_id: JobId
    fence: int
    ranks: tuple[RankState, ...]


@dataclass(frozen=True)
class ClusterState:
    """One look at the cluster."""

    nodes: tuple[Node, ...]
    attempts: tuple[AttemptState, ...]

    @cached_property
    def by_id(self) -> Mapping[AttemptId, AttemptState]:
        """The attempts by id."""
        return {attempt.attempt_id: attempt for attempt in self.attempts}


class NoCapacity(Exception):
    """The attempt does not fit now; nothing was started."""


class LaunchFailed(Exception):
    """The ranks could not be started, whatever was begun is released; the text names rank, node and cause."""


class ClusterUnavailable(Exception):
    """The cluster did not answer; nothing is known of what was asked. Look again before trying again."""


class Cluster(Protocol):
    """What the controller needs. Every call is idempotent by attempt id."""

    def observe(self) -> ClusterState:
        """Nodes and every attempt that exists, also those this server does not know. Raises ClusterUnavailable."""

    def launch(self, launch: Launch) -> None:
        """Start all ranks or none; a second call for a living attempt changes nothing.

        Raises NoCapacity, LaunchFailed, ClusterUnavailable.
        """

    def adopt(self, attempt_id: AttemptId, report_url: str) -> None:
        """Tell the actors of a living attempt where this server listens now."""

    def request_stop(self, attempt_id: AttemptId) -> None:
        """Ask all ranks to checkpoint and leave at the next step boundary."""

    def kill(self, attempt_id: AttemptId) -> None:
        """Kill every process of the attempt at once; reports already spooled are still sent."""

    def release(self, attempt_id: AttemptId) -> None:
        """Remove what is left: processes, actors, placement group. Afterwards `observe` no longer lists the attempt."""

    def close(self) -> None:
        """Let go of the connection; attempts live on."""
