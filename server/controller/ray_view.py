"""From what Ray, actors and agents say to the frozen values of `cluster.py`: pure functions. No ray import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from server.controller.cluster import AttemptState, Node, RankState
from server.controller.ray_placement import Placed, rank_name
from workers.contract import AttemptId, JobId, ResultRecord

Said = Mapping[str, Any]  # what an actor (`RankActor.state`) or an agent (`NodeAgent.lost_ranks`) says of a rank


def attempts_of(
    placed: Sequence[Placed],
    states: Mapping[str, Said],
    lost: Mapping[str, Said],
    launching: AbstractSet[AttemptId],
) -> Iterator[AttemptState]:
    """Every attempt that has a placement group, an actor, or a rank left on a node.

    Args:
        states: what living actors say, by the actor's name.
        lost: what agents say of ranks whose actor is dead, by the actor's name.
        launching: attempts that are being launched right now: a missing actor of theirs is still to come, and one
            without a process will be told to have it forked. Nobody does that for any other attempt.
    """
    groups = {group.attempt_id: group for group in placed}
    for said in [*states.values(), *lost.values()]:
        attempt = AttemptId(said["attempt_id"])
        known, ranks = groups.get(attempt), said["rank"] + 1
        if known is None or known.ranks < ranks:
            groups[attempt] = Placed(JobId(said["job_id"]), attempt, said["fence"], ranks, ())
    for group in groups.values():
        starting = group.attempt_id in launching
        ranks_of = (_rank(group, rank, states, lost, starting) for rank in range(group.ranks))
        yield AttemptState(group.attempt_id, group.job_id, group.fence, tuple(ranks_of))


def _rank(group: Placed, rank: int, states: Mapping[str, Said], lost: Mapping[str, Said], starting: bool) -> RankState:
    name = rank_name(group.attempt_id, rank)
    said = states.get(name) or lost.get(name)
    node_id = group.nodes[rank] if rank < len(group.nodes) else None
    if said is None or said["fence"] != group.fence:
        return RankState(rank, "starting" if starting else "lost", node_id)
    if said["status"] == "starting" and not starting:  # who made the actor died before it had a rank forked
        return RankState(rank, "lost", node_id)
    result = said["result"]
    return RankState(
        rank=rank,
        status=said["status"],
        node_id=said.get("node_id") or node_id,
        pid=said["pid"],
        start_ticks=said["start_ticks"],
        result=None if result is None else ResultRecord.model_validate(result),
        step=said["step"],
        heartbeat_age_seconds=said["heartbeat_age_seconds"],
        reports_closed=said["reports_closed"],
    )


def node_of(facts: Mapping[str, Any], agent: Mapping[str, Any], free: Mapping[str, Mapping[str, int]]) -> Node:
    """A living node.

    Args:
        facts: Ray's entry for it.
        agent: what its agent says; empty while it has none.
        free: free slots by resource (CPU, GPU), by node id.
    """
    resources = facts["Resources"]
    kind = "GPU" if resources.get("GPU") else "CPU"
    slots = int(resources.get(kind, 0))
    memory = int(agent.get("memory_bytes") or resources.get("memory", 0))
    return Node(
        id=facts["NodeID"],
        address=facts["NodeManagerAddress"],
        alive=True,
        device="cuda" if kind == "GPU" else "cpu",
        slots=slots,
        free_slots=free[kind].get(facts["NodeID"], 0),
        memory_bytes=memory,
        device_memory_bytes=int(agent.get("device_memory_bytes") or memory // max(slots, 1)),
        devices=tuple(agent.get("devices", ())),
    )
