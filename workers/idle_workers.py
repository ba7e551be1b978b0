"""Idle Ray workers of a node, kept ready so that an actor finds a process that has started already.

Note: why not by no-op tasks
An actor is given an idle worker only when that has never run anything. Workers that ran a no-op task serve tasks, not
actors; what made actors fast after a volley of tasks were the surplus processes that Ray had started for it. So they
are asked for directly (the raylet's PrestartWorkers) and counted in its statistics: a fresh worker has no job and no
actor. Measured, two cores: an actor answers after 0.11 s on a fresh worker, after 0.5 to 0.9 s without one.
"""

from __future__ import annotations

import time
from typing import Any

import ray  # noqa: F401  (its grpc modules need it loaded first)
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc

KEEP_SECONDS = 365 * 86400
RPC_SECONDS = 5.0
POLL_SECONDS = 0.1
WORKER = 0  # WorkerType.WORKER
PYTHON = 0  # Language.PYTHON


class IdleWorkers:
    """The fresh workers of one node."""

    def __init__(self, raylet: str) -> None:
        """`raylet`: host:port of the node's raylet. Ray's token must stand in the environment."""
        self._stub: Any = node_manager_pb2_grpc.NodeManagerServiceStub(  # type: ignore[no-untyped-call]
            init_grpc_channel(raylet)
        )

    def count(self) -> int:
        """Workers that have started and never run anything."""
        request = node_manager_pb2.GetNodeStatsRequest(include_memory_info=False)  # type: ignore[attr-defined]
        stats = self._stub.GetNodeStats(request, timeout=RPC_SECONDS).core_workers_stats
        return sum(
            item.pid > 0 and item.worker_type == WORKER and _nil(item.job_id) and _nil(item.actor_id) for item in stats
        )

    def fill(self, target: int, seconds: float) -> int:
        """Start workers until `target` are fresh or the time is over; returns how many are."""
        deadline = time.monotonic() + seconds
        fresh = self.count()
        while fresh < target and time.monotonic() < deadline:
            request = node_manager_pb2.PrestartWorkersRequest(  # type: ignore[attr-defined]
                language=PYTHON, num_workers=target - fresh, keep_alive_duration_secs=KEEP_SECONDS
            )
            self._stub.PrestartWorkers(request, timeout=RPC_SECONDS)  # Ray starts as many at once as there are cores
            before, patience = fresh, time.monotonic() + 5.0
            while fresh <= before and time.monotonic() < min(deadline, patience):
                time.sleep(POLL_SECONDS)
                fresh = self.count()
        return fresh


def _nil(identifier: bytes) -> bool:
    return not identifier.strip(b"\xff")
