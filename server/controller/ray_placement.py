"""Names on Ray, and what placement groups hold: pure functions over what Ray says. No ray import.

An attempt's placement group carries everything that must be known when all its actors are dead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.contract import AttemptId, JobId

NAMESPACE = "shardyard"  # Ray's; on a cluster that several installations share each has one of its own
Reports = Mapping[str, Mapping[str, float]]  # free resources by name, by node id


@dataclass(frozen=True)
class Placed:
    """An attempt's placement group."""

    job_id: JobId
    attempt_id: AttemptId
    fence: int
    ranks: int
    nodes: tuple[str, ...]  # node id of each rank, ranks of one node together; empty while it is not placed
    group_id: str = ""  # Ray's id, in hex
    kind: str = "CPU"  # resource of each bundle: CPU or GPU
    namespace: str = NAMESPACE  # whose attempt it is

    @property
    def name(self) -> str:
        return group_name(self.job_id, self.attempt_id, self.fence, self.ranks, self.namespace)


def group_name(job_id: str, attempt_id: str, fence: int, ranks: int, namespace: str = NAMESPACE) -> str:
    """The name of an attempt's placement group: Ray's table shows those of all namespaces, so it stands in it."""
    return f"attempt:{job_id}:{attempt_id}:{fence}:{ranks}:{namespace}"


def rank_name(attempt_id: str, rank: int) -> str:
    """The name of a rank's actor."""
    return f"rank:{attempt_id}:{rank}"


def agent_name(node_id: str) -> str:
    """The name of a node's agent."""
    return f"agent:{node_id}"


def placed_of(table: Mapping[str, Mapping[str, Any]]) -> list[Placed]:
    """The attempts in Ray's placement group table, those of every installation; what is removed is left out."""
    return [placed for entry in table.values() if (placed := _read(entry)) is not None]


def _read(entry: Mapping[str, Any]) -> Placed | None:
    word, *parts = str(entry["name"]).split(":")
    if word != "attempt" or len(parts) != 5 or entry["state"] == "REMOVED":
        return None
    job_id, attempt_id, fence, ranks, namespace = parts
    return Placed(
        job_id=JobId(job_id),
        attempt_id=AttemptId(attempt_id),
        fence=int(fence),
        ranks=int(ranks),
        nodes=tuple(sorted(node for node in entry["bundles_to_node_id"].values() if node)),
        group_id=str(entry["placement_group_id"]),
        kind="GPU" if any("GPU" in bundle for bundle in entry["bundles"].values()) else "CPU",
        namespace=namespace,
    )


# Note: why free slots are corrected
# A node reports its resources about every 100 ms. Until it has reported a new placement group, what that group holds
# still counts as free; so the bundles of groups that no report mentions yet are taken off. A release waits for the
# report that no longer mentions the group.
def free_slots(kind: str, placed: Sequence[Placed], reports: Reports) -> dict[str, int]:
    """Slots of a resource (CPU or GPU) that nobody holds, by node id."""
    free = {node: int(report.get(kind, 0)) for node, report in reports.items()}
    for group in placed:
        if group.kind == kind and not reported(group, reports):
            for node in group.nodes:
                free[node] = max(free.get(node, 0) - 1, 0)
    return free


def reported(group: Placed, reports: Reports) -> bool:
    """Whether some node's report mentions the placement group."""
    return any(group.group_id in name for report in reports.values() for name in report)
