"""kill -9 of anything, at any moment: what should live lives, what should die dies, nothing is left or doubled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from server.controller.cluster import AttemptState
from server.controller.ray_driver import connect_local
from tests.service.ray_harness import BODY, SLOTS, Harness, abandoned_shared_memory
from tests.waiting import PATIENCE_SECONDS, stretched, wait_for
from workers.launch_register import Entry, Register
from workers.process_table import PROC, ProcessId, identify, send_signal, wait_gone


def entries(ray: Harness, attempt: str) -> dict[int, Entry]:
    """Register entries of an attempt, by rank."""
    (folder,) = Path(ray.scratch).glob("node-*/ranks")
    return {entry.rank: entry for entry in Register(folder).entries(attempt)}


def actor_named(ray: Harness, title: str) -> ProcessId:
    """The Ray actor process of this head with this title, say `ray::NodeAgent`."""
    mark = f"RAY_AUTH_TOKEN_PATH={ray.folder}".encode()

    def look() -> ProcessId | None:
        for entry in PROC.glob("[0-9]*"):
            try:
                if entry.joinpath("cmdline").read_bytes().startswith(title.encode()) and (
                    mark in entry.joinpath("environ").read_bytes()
                ):
                    return identify(int(entry.name))
            except OSError:
                continue
        return None

    found = wait_for(look, what=title)
    assert found is not None
    return found


def kill9(process: ProcessId) -> None:
    assert send_signal(process, signal.SIGKILL), f"{process} is gone already"
    assert wait_gone(process, PATIENCE_SECONDS)


def died(state: AttemptState, rank: int) -> bool:
    result = state.ranks[rank].result
    return result is not None and result.outcome == "died"


def test_a_killed_rank_is_seen_with_its_signal_and_nothing_of_it_stays(ray: Harness) -> None:
    """Death by a signal is told as such: infrastructure, not the user's fault. Its last steps arrive."""
    launch = ray.launch(ranks=2, steps=10_000, tags=("setsid_child",))
    state = ray.until_step(launch, 3)
    rank = state.ranks[1]
    assert rank.pid is not None and rank.start_ticks is not None
    kill9(ProcessId(rank.pid, rank.start_ticks))
    state = ray.until(launch, lambda state: died(state, 1))
    assert state.ranks[1].result is not None and state.ranks[1].result.signal == signal.SIGKILL
    wait_for(lambda: (str(launch.attempt_id), 1) in ray.sink.closed)
    steps = ray.sink.steps(launch.attempt_id, 1)
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 3
    ray.cluster.kill(launch.attempt_id)
    assert ray.processes(launch) == []
    ray.released(launch)


def test_a_killed_actor_takes_its_rank_along_and_its_reports_still_arrive(ray: Harness) -> None:
    """The kernel kills the rank through the pipe, also a deaf one; the agent sends the tail and says how it ended."""
    launch = ray.launch(ranks=2, steps=10_000, tags=("deaf:1", "setsid_child"))
    ray.until_step(launch, 3)
    entry = entries(ray, launch.attempt_id)[1]
    assert entry.process is not None
    kill9(entry.actor)
    assert wait_gone(entry.process, stretched(2.0)), "the rank outlived its actor"
    state = ray.until(launch, lambda state: state.ranks[1].status == "lost" and state.ranks[1].reports_closed)
    assert state.ranks[0].status == "running"
    assert (str(launch.attempt_id), 1) in ray.sink.closed
    steps = ray.sink.steps(launch.attempt_id, 1)
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 3
    assert [result["outcome"] for result in ray.sink.results(launch.attempt_id, 1)] == ["died"]
    ray.cluster.kill(launch.attempt_id)
    wait_for(lambda: ray.processes(launch) == [])
    ray.released(launch)


def test_an_actor_killed_after_the_end_changes_no_result(ray: Harness) -> None:
    """A rank that finished has finished, whatever happens to its actor before the release."""
    launch = ray.launch(ranks=1, steps=2)
    ray.until_exited(launch)
    ray.until_closed(launch)
    kill9(entries(ray, launch.attempt_id)[0].actor)
    state = ray.until(launch, lambda state: state.ranks[0].reports_closed)
    assert state.ranks[0].status == "exited"
    assert state.ranks[0].result is not None and state.ranks[0].result.outcome == "finished"
    assert len(ray.sink.results(launch.attempt_id, 0)) == 1
    ray.released(launch)


def test_a_killed_agent_ends_no_attempt_and_a_new_one_stands_before_the_next_launch(ray: Harness) -> None:
    """The zygote goes with its agent, the ranks stay; their results come from their own files."""
    launch = ray.launch(ranks=2, steps=60)
    ray.until_step(launch, 2)
    agent = actor_named(ray, "ray::NodeAgent")
    kill9(agent)
    second = ray.launch(ranks=2, steps=2)
    assert actor_named(ray, "ray::NodeAgent") != agent
    state = ray.until_exited(second)
    assert [rank.result.exit_code for rank in state.ranks if rank.result] == [0, 0]
    state = ray.until_exited(launch)
    assert [(r.result.outcome, r.result.step) for r in state.ranks if r.result] == [("finished", 60)] * 2
    ray.until_closed(launch)
    ray.cluster.release(second.attempt_id)
    ray.released(launch)


def test_a_rank_killed_while_no_zygote_stands_is_told_as_dead(ray: Harness) -> None:
    """Nobody reaps the status, and no result file is there: it died by a signal."""
    launch = ray.launch(ranks=1, steps=10_000)
    state = ray.until_step(launch, 1)
    kill9(zygote(ray))
    rank = state.ranks[0]
    assert rank.pid is not None and rank.start_ticks is not None
    kill9(ProcessId(rank.pid, rank.start_ticks))
    ray.until(launch, lambda state: died(state, 0))
    ray.released(launch)


def test_a_killed_zygote_is_replaced_and_the_ranks_live_on(ray: Harness) -> None:
    """The next launch waits for the new one instead of failing."""
    launch = ray.launch(ranks=1, steps=10_000)
    ray.until_step(launch, 1)
    kill9(zygote(ray))
    second = ray.launch(ranks=1, steps=2)
    state = ray.until_exited(second)
    assert state.ranks[0].result is not None and state.ranks[0].result.exit_code == 0
    ray.until_step(launch, 5)
    ray.cluster.release(second.attempt_id)
    ray.released(launch)


def zygote(ray: Harness) -> ProcessId:
    """The zygote of this head's node."""
    for entry in PROC.glob("[0-9]*"):
        try:
            line = entry.joinpath("cmdline").read_bytes()
        except OSError:
            continue
        if b"workers.zygote" in line and ray.scratch.encode() in line:
            found = identify(int(entry.name))
            if found is not None and found.alive() and os.getsid(found.pid) == found.pid and is_zygote(found.pid):
                return found
    raise AssertionError("no zygote")


def is_zygote(pid: int) -> bool:
    """Not a rank, which shows the same command line: a rank carries its attempt's mark."""
    return b"SHARDYARD_ATTEMPT=----" in (PROC / str(pid) / "environ").read_bytes()


SERVER = """
import sys, pathlib
from server.controller.ray_driver import connect_local
from tests.service.ray_harness import BODY, SLOTS
import pickle
cluster = connect_local(pathlib.Path(sys.argv[1]), SLOTS, options=BODY)
cluster.launch(pickle.loads(sys.stdin.buffer.read()))
print(cluster.pid, flush=True)
sys.stdin.close()
import signal
signal.pause()
"""


def test_a_killed_server_leaves_its_attempt_running_and_the_next_one_adopts_it(ray: Harness) -> None:
    """The server that launched is killed with -9; another finds the attempt by name, steers it, and misses no step."""
    import pickle

    launch = ray.order(ranks=2, steps=10_000)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(ray.folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(pickle.dumps(launch))
    server.stdin.close()
    driver = identify(int(server.stdout.readline()))
    assert driver is not None
    ray.until_step(launch, 2)
    server.kill()
    server.wait()
    assert wait_gone(driver, PATIENCE_SECONDS), "the driver outlived its server"
    step = max(rank.step for rank in ray.until_step(launch, 3).ranks)
    ray.cluster.adopt(launch.attempt_id, ray.sink.url)
    ray.until_step(launch, step + 3)
    ray.cluster.request_stop(launch.attempt_id)
    ray.until_exited(launch)
    ray.until_closed(launch)
    for rank in range(2):
        steps = ray.sink.steps(launch.attempt_id, rank)
        assert steps == list(range(1, len(steps) + 1))
    ray.released(launch)


def test_reports_follow_a_server_that_moved(ray: Harness) -> None:
    """The old address is dead; after adoption everything arrives at the new one, also what a dead actor left."""
    from dataclasses import replace

    launch = replace(ray.order(ranks=2, steps=10_000), report_url="http://127.0.0.1:9/v1/reports")
    ray.cluster.launch(launch)
    ray.until_step(launch, 2)
    kill9(entries(ray, launch.attempt_id)[1].actor)
    ray.until(launch, lambda state: state.ranks[1].status == "lost")
    ray.cluster.adopt(launch.attempt_id, ray.sink.url)
    ray.cluster.request_stop(launch.attempt_id)
    ray.until_closed(launch)
    assert ray.sink.steps(launch.attempt_id, 1)[:2] == [1, 2]
    ray.released(launch)


def test_a_driver_that_died_is_replaced_by_the_next_call(ray: Harness) -> None:
    """Losing the process that talks to Ray costs one connection, no attempt."""
    launch = ray.launch(ranks=1, steps=10_000)
    ray.until_step(launch, 1)
    pid = ray.cluster.pid
    assert pid is not None
    process = identify(pid)
    assert process is not None
    kill9(process)
    assert ray.attempt(launch) is not None
    assert ray.cluster.pid != pid
    ray.released(launch)


def test_a_half_started_attempt_is_started_afresh(ray: Harness) -> None:
    """The server died between two actors: launching the same attempt again ends as one running attempt."""
    launch = ray.launch(ranks=2, steps=10_000)
    ray.until_step(launch, 1)
    kill9(entries(ray, launch.attempt_id)[0].actor)
    ray.until(launch, lambda state: state.ranks[0].status == "lost")
    ray.cluster.launch(launch)
    state = ray.until(launch, lambda state: all(rank.status == "running" for rank in state.ranks))
    assert len({rank.pid for rank in state.ranks}) == 2
    assert len(ray.processes(launch)) == 2
    ray.released(launch)


def test_ten_starts_and_kills_leave_no_slot_no_process_no_file(ray: Harness) -> None:
    """After 10 cycles all slots are free, no process carries a mark, /dev/shm holds nothing new, no folder stays."""
    connect_local(ray.folder, SLOTS, options=BODY)  # a second server's view starts nothing
    shared, sockets = abandoned_shared_memory(), set(os.listdir(ray.scratch))
    for cycle in range(10):
        launch = ray.launch(ranks=2, steps=10_000)
        if cycle % 2:
            ray.until_step(launch, 1)
        ray.cluster.kill(launch.attempt_id)
        ray.cluster.release(launch.attempt_id)
        assert ray.processes(launch) == []
    assert ray.observe().attempts == ()
    wait_for(lambda: ray.free_slots() == SLOTS)
    wait_for(lambda: abandoned_shared_memory() <= shared, "shared memory is back")
    assert set(os.listdir(ray.scratch)) == sockets
    (folder,) = Path(ray.scratch).glob("node-*/ranks")
    assert list(folder.iterdir()) == []
