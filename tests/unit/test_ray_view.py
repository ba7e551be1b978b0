"""What is observed, from literals of what Ray, actors and agents say: also when some of them are dead."""

from __future__ import annotations

from typing import Any

from server.controller.cluster import AttemptState
from server.controller.ray_placement import Placed, free_slots, group_name, placed_of, rank_name, reported
from server.controller.ray_view import attempts_of, node_of
from workers.contract import AttemptId, JobId

JOB, ATTEMPT = JobId("job-1"), AttemptId("attempt-1")
GROUP = Placed(JOB, ATTEMPT, 3, 2, ("node-a", "node-b"), "abcd")


def said(rank: int, **changes: Any) -> dict[str, Any]:
    """What the actor of a running rank says."""
    return {
        "job_id": JOB,
        "attempt_id": ATTEMPT,
        "fence": 3,
        "rank": rank,
        "status": "running",
        "pid": 100 + rank,
        "start_ticks": 7,
        "result": None,
        "step": 5,
        "heartbeat_age_seconds": 0.1,
        "reports_closed": False,
        **changes,
    }


def named(*ranks: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {rank_name(said["attempt_id"], said["rank"]): said for said in ranks}


def one(attempts: Any) -> AttemptState:
    (attempt,) = attempts
    assert isinstance(attempt, AttemptState)
    return attempt


def entry(name: str, **changes: Any) -> dict[str, Any]:
    """A line of Ray's placement group table."""
    bundles = {0: {"CPU": 1.0}, 1: {"CPU": 1.0}}
    nodes = {0: "node-b", 1: "node-a"}
    usual = {"name": name, "state": "CREATED", "placement_group_id": "abcd", "bundles": bundles}
    return {**usual, "bundles_to_node_id": nodes, **changes}


def test_a_name_tells_everything_about_an_attempt() -> None:
    """Job, attempt, fence and number of ranks are known when all actors are dead."""
    assert placed_of({"abcd": entry(group_name(JOB, ATTEMPT, 3, 2))}) == [GROUP]


def test_a_name_tells_whose_attempt_it_is() -> None:
    """Ray's table shows the groups of all namespaces."""
    (placed,) = placed_of({"abcd": entry(group_name(JOB, ATTEMPT, 3, 2, "shardyard-1a2b"))})
    assert placed.namespace == "shardyard-1a2b" != GROUP.namespace
    assert placed.name == group_name(JOB, ATTEMPT, 3, 2, "shardyard-1a2b") != GROUP.name


def test_groups_of_others_and_removed_ones_are_not_ours() -> None:
    """Ray may serve more than us."""
    table = {
        "1": entry("somebody else's"),
        "2": entry(group_name(JOB, ATTEMPT, 1, 2), state="REMOVED"),
        "3": entry(""),
        "4": entry("attempt:too:few"),
    }
    assert placed_of(table) == []


def test_living_ranks_are_what_their_actors_say() -> None:
    """Rank by rank, on the node of its bundle."""
    attempt = one(attempts_of([GROUP], named(said(0), said(1, status="exited")), {}, set()))
    assert (attempt.job_id, attempt.attempt_id, attempt.fence) == (JOB, ATTEMPT, 3)
    assert [(r.status, r.pid, r.node_id) for r in attempt.ranks] == [
        ("running", 100, "node-a"),
        ("exited", 101, "node-b"),
    ]


def test_an_actor_whose_launcher_died_before_it_had_a_rank_forked_is_lost() -> None:
    """A server killed in the middle of a launch: the next one does not wait for ranks that nobody will start."""
    states = named(said(0, status="starting", pid=None, start_ticks=None), said(1))
    assert [rank.status for rank in one(attempts_of([GROUP], states, {}, set())).ranks] == ["lost", "running"]
    assert [rank.status for rank in one(attempts_of([GROUP], states, {}, {ATTEMPT})).ranks] == ["starting", "running"]


def test_a_missing_actor_is_lost_unless_it_is_still_to_come() -> None:
    """During a launch it is starting; afterwards it is gone."""
    states = named(said(0))
    assert [r.status for r in one(attempts_of([GROUP], states, {}, set())).ranks] == ["running", "lost"]
    assert [r.status for r in one(attempts_of([GROUP], states, {}, {ATTEMPT})).ranks] == ["running", "starting"]


def test_an_answer_with_another_fence_is_not_trusted() -> None:
    """An actor of an earlier launch that is dying says nothing about this one."""
    assert [r.status for r in one(attempts_of([GROUP], named(said(0), said(1, fence=2)), {}, set())).ranks] == [
        "running",
        "lost",
    ]


def test_the_agent_speaks_for_a_rank_whose_actor_died() -> None:
    """Its result and whether its reports are closed are still known, and where it was."""
    result = {"kind": "result", "at": "2026-11-01T12:00:00Z", "outcome": "finished", "step": 9}
    lost = named(said(1, status="exited", result=result, reports_closed=True, node_id="node-b"))
    rank = one(attempts_of([GROUP], named(said(0)), lost, set())).ranks[1]
    assert rank.result is not None
    assert (rank.status, rank.result.step, rank.reports_closed, rank.node_id) == ("exited", 9, True, "node-b")


def test_an_attempt_without_a_placement_group_is_still_seen() -> None:
    """What is left of it must be released: an actor or a register entry is enough."""
    attempt = one(attempts_of([], {}, named(said(1, status="lost")), set()))
    assert [r.status for r in attempt.ranks] == ["lost", "lost"] and attempt.fence == 3


def test_slots_of_a_group_that_no_node_has_reported_yet_are_not_free() -> None:
    """Two launches within a tenth of a second do not take the same slot."""
    before = {"node-a": {"CPU": 4.0}, "node-b": {"CPU": 1.0}}
    assert not reported(GROUP, before)
    assert free_slots("CPU", [GROUP], before) == {"node-a": 3, "node-b": 0}
    after = {"node-a": {"CPU": 3.0, "CPU_group_0_abcd": 1.0}, "node-b": {}}
    assert reported(GROUP, after)
    assert free_slots("CPU", [GROUP], after) == {"node-a": 3, "node-b": 0}


def test_a_node_with_gpus_offers_gpus_and_one_without_offers_slots() -> None:
    """Memory per slot: of one GPU, or the node's divided by its slots."""
    facts = {"NodeID": "n", "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 4.0, "memory": 80.0}}
    free = {"CPU": {"n": 3}, "GPU": {"n": 1}}
    node = node_of(facts, {}, free)
    assert (node.device, node.slots, node.free_slots, node.device_memory_bytes) == ("cpu", 4, 3, 20)
    agent = {"memory_bytes": 100, "device_memory_bytes": 64, "devices": ("GPU-a", "GPU-b")}
    node = node_of({**facts, "Resources": {"CPU": 4.0, "GPU": 2.0}}, agent, free)
    assert (node.device, node.slots, node.free_slots, node.device_memory_bytes) == ("cuda", 2, 1, 64)
    assert (node.memory_bytes, node.devices) == (100, ("GPU-a", "GPU-b"))
