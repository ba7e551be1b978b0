"""The real cluster keeps the promises of the protocol `Cluster`."""

from __future__ import annotations

import os
import signal
import tempfile
from dataclasses import replace

import pytest

from server.controller.cluster import LaunchFailed, NoCapacity
from server.controller.ray_driver import RayDriver
from server.controller.ray_head import find_head
from server.controller.ray_target import RayTarget
from tests.service.ray_harness import BODY, SLOTS, Harness
from tests.waiting import wait_for
from workers.process_table import identify
from workers.rank_actor import STALE_SECONDS


def test_a_launched_attempt_trains_reports_and_ends(ray: Harness) -> None:
    """From a launch to results of all ranks, every step reported once, every line printed kept."""
    launch = ray.launch(ranks=2, steps=5)
    state = ray.until_exited(launch)
    ray.until_closed(launch)
    for rank in range(2):
        assert ray.sink.steps(launch.attempt_id, rank) == [1, 2, 3, 4, 5]
        assert f"rank {rank} step 5" in ray.sink.output(launch.attempt_id, rank)
        result = state.ranks[rank].result
        assert result is not None and (result.outcome, result.step, result.exit_code) == ("finished", 5, 0)
        assert result.peak_rss is not None and result.peak_rss > 2**20
        assert len(ray.sink.results(launch.attempt_id, rank)) == 1
    assert launch.report_token in ray.sink.tokens
    ray.released(launch)


def test_what_is_observed_names_the_processes(ray: Harness) -> None:
    """Pid and start time of each rank stand for a process that exists, on a node that exists."""
    launch = ray.launch(ranks=2, steps=10_000)
    state = ray.until_step(launch, 1)
    assert (state.job_id, state.fence) == (launch.job_id, launch.fence)
    nodes = {node.id for node in ray.observe().nodes}
    for rank in state.ranks:
        assert rank.status == "running" and rank.node_id in nodes and rank.pid is not None
        process = identify(rank.pid)
        assert process is not None and process.start_ticks == rank.start_ticks
    assert ray.free_slots() == SLOTS - 2
    ray.released(launch)


def test_two_installations_on_one_cluster_do_not_see_each_other(ray: Harness) -> None:
    """Another namespace lists nothing of ours and ends nothing of ours; what we hold is not free to it."""
    launch = ray.launch(ranks=2, steps=10_000)
    ray.until_step(launch, 1)
    head = find_head(ray.folder)
    assert head is not None
    with tempfile.TemporaryDirectory(prefix="sy-") as scratch:
        target = RayTarget(head.address, head.token_path, head.local, scratch, head.process)
        other = RayDriver(lambda: target, replace(BODY, namespace="shardyard-other"))
        seen = other.observe()
        assert seen.attempts == () and sum(node.free_slots for node in seen.nodes) == SLOTS - 2
        other.kill(launch.attempt_id)
        theirs = ray.order(ranks=1, steps=2)
        other.launch(theirs)
        assert [a.attempt_id for a in other.observe().attempts] == [theirs.attempt_id]
        assert [a.attempt_id for a in ray.observe().attempts] == [launch.attempt_id]
        other.release(theirs.attempt_id)
        other.close()
    state = ray.attempt(launch)
    assert state is not None and [rank.status for rank in state.ranks] == ["running", "running"]
    ray.released(launch)


def test_a_second_launch_of_a_living_attempt_changes_nothing(ray: Harness) -> None:
    """A lost answer may be asked for again: the same processes run on."""
    launch = ray.launch(ranks=2, steps=10_000)
    before = [rank.pid for rank in ray.until_step(launch, 1).ranks]
    ray.cluster.launch(launch)
    state = ray.attempt(launch)
    assert state is not None and [rank.pid for rank in state.ranks] == before
    ray.released(launch)


def test_what_does_not_fit_is_refused_and_leaves_nothing(ray: Harness) -> None:
    """More ranks than slots: NoCapacity, no placement group waits anywhere."""
    launch = ray.order(ranks=SLOTS + 1)
    with pytest.raises(NoCapacity, match=str(SLOTS)):
        ray.cluster.launch(launch)
    assert ray.attempt(launch) is None
    assert ray.free_slots() == SLOTS


def test_a_stop_request_lets_every_rank_leave_by_itself(ray: Harness) -> None:
    """The flag reaches all ranks; they end with the outcome `stopped`."""
    launch = ray.launch(ranks=2, steps=10_000)
    ray.until_step(launch, 2)
    ray.cluster.request_stop(launch.attempt_id)
    state = ray.until_exited(launch)
    assert {rank.result.outcome for rank in state.ranks if rank.result} == {"stopped"}
    ray.released(launch)


def test_a_kill_ends_a_rank_that_hears_nothing(ray: Harness) -> None:
    """A rank that ignores signals and one that is stuck in C code die at once; their reports are still sent."""
    launch = ray.launch(ranks=2, steps=10_000, tags=("deaf:0", "stuck_in_c:1"))
    ray.until_step(launch, 1)
    ray.cluster.kill(launch.attempt_id)
    assert ray.processes(launch) == []
    state = ray.until_exited(launch)
    assert [(r.result.outcome, r.result.signal) for r in state.ranks if r.result] == [("died", 9), ("died", 9)]
    ray.until_closed(launch)
    assert [ray.sink.results(launch.attempt_id, rank)[0]["outcome"] for rank in range(2)] == ["died", "died"]
    ray.released(launch)


def test_children_in_sessions_of_their_own_end_with_their_rank(ray: Harness) -> None:
    """A child that called setsid has left the group; it is found by its mark, whether it was forked or executed."""
    launch = ray.launch(ranks=2, steps=3, tags=("setsid_child", "forked_child"))
    ray.until_exited(launch)
    assert ray.processes(launch) == []
    ray.released(launch)


def test_an_exception_in_one_rank_is_told_with_its_traceback(ray: Harness) -> None:
    """Rank 1 raises before the first collective; what it raised is its result, at once and not after a time limit."""
    launch = ray.launch(ranks=2, tags=("raise:1",))
    state = ray.until(launch, lambda state: state.ranks[1].result is not None)
    result = state.ranks[1].result
    assert result is not None and result.error is not None
    assert (result.outcome, result.error.type, result.exit_code) == ("failed", "ValueError", 1)
    assert "scripted mishap" in result.error.traceback
    assert state.ranks[0].status == "running"  # it waits in the rendezvous: the controller ends it
    ray.cluster.kill(launch.attempt_id)
    ray.until_exited(launch)
    ray.released(launch)


def test_a_rank_that_never_joins_is_named_by_its_step_and_stacks(ray: Harness) -> None:
    """Which rank hangs can be told: it has no step, and its stack says where it waits."""
    launch = ray.launch(ranks=2, tags=("never_joins:1",))
    ray.until(launch, lambda state: all(rank.pid for rank in state.ranks))
    wait_for(lambda: "in run" in ray.cluster.stacks(launch.attempt_id).get(1, ""))
    ray.released(launch)


def test_killing_a_stuck_attempt_keeps_the_stacks_of_all_ranks(ray: Harness) -> None:
    """One rank is stopped by a signal, the other waits for it: both stacks are in the logs, the culprit's state too."""
    launch = ray.launch(ranks=2, steps=10_000, tags=("never_joins:1",))
    state = ray.until(launch, lambda state: all(rank.pid for rank in state.ranks))
    assert state.ranks[1].pid is not None
    os.kill(state.ranks[1].pid, signal.SIGSTOP)
    ray.until(launch, lambda state: all(rank.heartbeat_age_seconds > STALE_SECONDS for rank in state.ranks))
    ray.cluster.kill(launch.attempt_id)
    ray.until_closed(launch)
    assert "in join" in ray.sink.output(launch.attempt_id, 0)
    assert "stopped" in ray.sink.output(launch.attempt_id, 1)
    ray.released(launch)


def test_release_may_be_repeated_and_asked_for_what_never_was(ray: Harness) -> None:
    """Release is idempotent."""
    launch = ray.launch(ranks=1, steps=10_000)
    ray.until_step(launch, 1)
    ray.released(launch)
    ray.released(launch)
    ray.released(ray.order())


def test_two_attempts_started_together_never_share_a_port(ray: Harness) -> None:
    """Rank 0's socket is bound before its address is told: both groups join, again and again."""
    for _ in range(3):
        pair = [ray.launch(ranks=2, steps=2) for _ in range(2)]
        for launch in pair:
            state = ray.until_exited(launch)
            assert {rank.result.outcome for rank in state.ranks if rank.result} == {"finished"}
        for launch in pair:
            ray.cluster.release(launch.attempt_id)
    ray.released(pair[0])


def test_reports_are_applied_once_whatever_the_server_does(ray: Harness) -> None:
    """Refusals and lost answers in the middle: no step is missing, none is doubled."""
    script = {2: "down", 3: "drop", 4: "down", 6: "drop", 7: "drop"}
    first = ray.sink.num_requests
    ray.sink.trouble = lambda number: script.get(number - first)
    try:
        launch = ray.launch(ranks=2, steps=12)
        ray.until_closed(launch)
    finally:
        ray.sink.trouble = lambda number: None
    for rank in range(2):
        assert ray.sink.steps(launch.attempt_id, rank) == list(range(1, 13))
    ray.released(launch)


def test_an_attempt_whose_server_stays_away_leaves_by_itself(ray: Harness) -> None:
    """After orphan_seconds without a server the rank is asked to checkpoint, and its actor ends."""
    launch = ray.order(ranks=1, steps=10_000, orphan_seconds=1.0)
    ray.cluster.launch(replace(launch, report_url="http://127.0.0.1:9/v1/reports"))
    result = ray.folder / "ranks" / launch.attempt_id / "0" / "result.json"
    wait_for(result.exists)
    assert '"stopped"' in result.read_text()
    wait_for(lambda: ray.processes(launch) == [])
    ray.released(launch)


def test_a_rank_that_cannot_be_started_is_named_and_the_rest_released(ray: Harness) -> None:
    """The folder of rank 1 cannot be made: LaunchFailed names the rank, and no other rank stays."""
    launch = ray.order(ranks=2)
    blocked = ray.folder / "blocked"
    blocked.write_text("a file, not a folder")
    bad = launch.orders[1].model_copy(update={"rank_folder": str(blocked / "1")})
    with pytest.raises(LaunchFailed, match="rank 1"):
        ray.cluster.launch(replace(launch, orders=(launch.orders[0], bad)))
    assert ray.attempt(launch) is None
    assert ray.processes(launch) == []
    wait_for(lambda: ray.free_slots() == SLOTS)
