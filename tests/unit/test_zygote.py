"""Forking ranks from the zygote, and ending them: whatever they do and whoever dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_for
from workers.forked_process import ExitStatus, ForkedProcess, ZygoteGone
from workers.process_table import identify, marked, wait_gone
from workers.rank_process import OUTPUT_FILE, conclude, end_of, fork_rank
from workers.zygote import STACK_SIGNAL
from workers.zygote_process import ZygoteProcess

ROOT = Path(__file__).parents[2]


def new_zygote(folder: Path) -> ZygoteProcess:
    """A zygote of this test that answers."""
    zygote = ZygoteProcess(folder, "zygote_bodies:run", ["torch"], os.environ, path=[str(Path(__file__).parent)])
    wait_for(lambda: zygote.answer(60.0) is not None or zygote.ended())
    return zygote


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZygoteProcess]:
    zygote = new_zygote(tmp_path_factory.mktemp("zygote"))
    yield zygote
    zygote.end()


def fork(
    zygote: ZygoteProcess, folder: Path, rank: int = 0, listener: int | None = None, **order: Any
) -> ForkedProcess:
    """A rank that does what the order says."""
    home = folder / str(rank)
    home.mkdir(exist_ok=True)
    (home / "order.json").write_text(json.dumps({"ready": str(home / "ready"), **order}))
    return fork_rank(zygote.socket_path, home / "order.json", mark_of(folder, rank), {"GIVEN": "yes"}, listener)


def mark_of(folder: Path, rank: int = 0) -> dict[str, str]:
    return {"SHARDYARD_ATTEMPT": f"attempt-of-{folder.name[:40]}", "SHARDYARD_RANK": str(rank)}


def pids(mark: dict[str, str]) -> list[int]:
    return [process.pid for process in marked(mark)]


def test_the_zygote_has_one_thread_and_a_working_kill_pipe(zygote: ZygoteProcess) -> None:
    """A fork copies one thread and loses the locks of the others: there must be none."""
    facts = zygote.answer(60.0)
    assert facts is not None
    assert facts["threads"] == 1
    assert facts["kernel_kills"] is True
    assert facts["pid"] == zygote.pid


def test_a_fork_leads_its_group_in_its_folder_with_its_output(zygote: ZygoteProcess, tmp_path: Path) -> None:
    """The rank is what enter_rank promises; its status and peak memory come from the zygote."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        rank = fork(zygote, tmp_path, listener=server.fileno(), act="tell")
        assert rank.ended(60.0)
        status = rank.collect()
    facts = json.loads((tmp_path / "0" / OUTPUT_FILE).read_text())
    assert facts["pid"] == facts["group"] == facts["session"] == rank.identity.pid
    assert (facts["folder"], facts["environment"], facts["listens"]) == (str(tmp_path / "0"), "yes", True)
    assert (facts["threads"], facts["sum"]) == (1, 4096.0)
    assert (status.exit_code, status.signal) == (0, None)
    assert status.peak_rss is not None and status.peak_rss > 50 * 2**20


def test_an_exception_is_printed_and_exits_with_one(zygote: ZygoteProcess, tmp_path: Path) -> None:
    """Nothing of the zygote runs on in a failed fork."""
    rank = fork(zygote, tmp_path, act="fail")
    assert rank.ended(60.0)
    assert rank.collect().exit_code == 1
    assert "ValueError: scripted mishap" in (tmp_path / "0" / OUTPUT_FILE).read_text()


@pytest.mark.parametrize("code", [0, 3])
def test_sys_exit_gives_its_code(zygote: ZygoteProcess, tmp_path: Path, code: int) -> None:
    """A user's sys.exit is an exit of the rank."""
    rank = fork(zygote, tmp_path, act="leave", code=code)
    assert rank.ended(60.0)
    assert rank.collect().exit_code == code


@pytest.mark.parametrize("in_c", [False, True])
def test_closing_the_pipe_kills_the_whole_group(zygote: ZygoteProcess, tmp_path: Path, in_c: bool) -> None:
    """A rank that ignores signals, or never returns from C, dies with its children when the writer goes."""
    rank = fork(zygote, tmp_path, act="stay", in_c=in_c)
    wait_for((tmp_path / "0" / "ready").exists)
    assert len(pids(mark_of(tmp_path))) == 5  # itself, two forks, two executed
    rank._close_pipe()
    assert rank.ended(60.0)
    rank.collect()
    assert pids(mark_of(tmp_path)) == []  # those with sessions of their own were found by their mark


def test_a_rank_may_be_ended_by_two_threads_at_once(
    zygote: ZygoteProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill closes the pipe; before it goes on, the watcher has seen the end and collects: no second close."""
    rank = fork(zygote, tmp_path, act="stay")
    wait_for((tmp_path / "0" / "ready").exists)
    collected: list[ExitStatus] = []

    def close(number: int) -> None:
        monkeypatch.undo()
        os.close(number)
        assert rank.ended(60.0)
        watcher = threading.Thread(target=lambda: collected.append(rank.collect()))
        watcher.start()
        watcher.join()

    monkeypatch.setattr("workers.forked_process.os.close", close)
    rank.kill()
    assert [status.signal for status in collected] == [signal.SIGKILL]


def test_an_actor_that_loses_one_of_its_threads_ends() -> None:
    """Its rank goes with it, and the controller hears of a lost rank instead of waiting for ever."""
    program = (
        "import threading; from workers.rank_actor import begin; begin('watch', int, 'x'); threading.Event().wait()"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60.0)
    assert ended.returncode == 1 and "ValueError" in ended.stderr


def test_a_kill_leaves_other_ranks_of_the_attempt_alone(zygote: ZygoteProcess, tmp_path: Path) -> None:
    """The mark names the rank too."""
    first, second = (fork(zygote, tmp_path, rank, act="stay") for rank in range(2))
    for rank in range(2):
        wait_for((tmp_path / str(rank) / "ready").exists)
    first.kill()
    assert first.ended(60.0) and not second.ended()
    assert pids(mark_of(tmp_path, 0)) == [] and len(pids(mark_of(tmp_path, 1))) == 5
    second.kill()
    assert second.ended(60.0)
    assert [rank.collect().signal for rank in (first, second)] == [signal.SIGKILL] * 2


OWNER = """
import json, os, sys, signal
from pathlib import Path
from workers.rank_process import fork_rank
order = Path(sys.argv[2])
rank = fork_rank(sys.argv[1], order, json.loads(sys.argv[3]), {"GIVEN": "yes"}, None)
print(rank.identity.pid, flush=True)
signal.pause()
"""


def test_the_death_of_its_owner_kills_a_rank_stuck_in_c(zygote: ZygoteProcess, tmp_path: Path) -> None:
    """kill -9 of the process that holds the writer: the kernel ends the rank, nobody else has to."""
    home = tmp_path / "0"
    home.mkdir()
    (home / "order.json").write_text(json.dumps({"act": "stay", "in_c": True, "ready": str(home / "ready")}))
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, zygote.socket_path, str(home / "order.json"), json.dumps(mark_of(tmp_path))],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert owner.stdout is not None
    rank = identify(int(owner.stdout.readline()))
    assert rank is not None
    wait_for((home / "ready").exists)
    owner.kill()
    owner.wait()
    assert wait_gone(rank, 10.0)
    for process in marked(mark_of(tmp_path)):  # in sessions of their own: the agent's sweep ends them
        os.kill(process.pid, signal.SIGKILL)


def test_stacks_name_the_function_or_say_that_it_does_not_answer(zygote: ZygoteProcess, tmp_path: Path) -> None:
    """A Python stack where Python runs; the kernel's view of a stopped process."""
    rank = fork(zygote, tmp_path, act="stay")
    wait_for((tmp_path / "0" / "ready").exists)
    assert "in stay" in rank.stacks()
    rank.signal(signal.SIGSTOP)
    assert "does not answer" in rank.stacks(0.2)
    rank.kill()
    assert rank.ended(60.0)
    rank.collect()


def test_a_rank_whose_stacks_are_asked_for_as_it_begins_lives(zygote: ZygoteProcess, tmp_path: Path) -> None:
    """Its process is known before it listens for the signal, whose default is to end it."""
    for number in range(10):
        rank = fork(zygote, tmp_path, number, act="stay")
        rank.signal(STACK_SIGNAL)
        wait_for(lambda rank=rank, number=number: rank.ended() or (tmp_path / str(number) / "ready").exists())
        assert not rank.ended()
        rank.kill()
        assert rank.ended(60.0)
        rank.collect()


def test_a_dead_zygote_leaves_ranks_and_says_no_status(tmp_path: Path) -> None:
    """Its ranks live on, their own word decides how they ended."""
    zygote = new_zygote(tmp_path)
    rank = fork(zygote, tmp_path, act="stay")
    wait_for((tmp_path / "0" / "ready").exists)
    zygote.end()
    assert zygote.ended()
    assert not rank.ended(0.2)
    rank.kill()
    assert rank.ended(60.0)
    status = rank.collect()
    assert (status.exit_code, status.signal, status.peak_rss) == (None, None, None)
    assert conclude(tmp_path / "0", status)["signal"] == signal.SIGKILL
    with pytest.raises(ZygoteGone):
        fork(zygote, tmp_path, act="tell")


def test_a_rank_that_said_how_it_ended_is_believed(tmp_path: Path) -> None:
    """The result file decides; code and memory are added from the status."""
    (tmp_path / "result.json").write_text(json.dumps({"kind": "result", "outcome": "finished", "step": 7}))
    result = end_of(tmp_path, ExitStatus(0, None, 123))
    assert (result["outcome"], result["step"], result["exit_code"], result["peak_rss"]) == ("finished", 7, 0, 123)
    assert json.loads((tmp_path / "result.json").read_text()) == result


def test_a_death_is_kept_in_both_files_and_a_full_disk_does_not_hide_it(tmp_path: Path) -> None:
    """Result file and spool say it; without a folder to write to, the answer is the same."""
    result = end_of(tmp_path, ExitStatus(None, signal.SIGSEGV, None))
    assert (result["outcome"], result["signal"]) == ("died", signal.SIGSEGV)
    assert (
        json.loads((tmp_path / "spool.jsonl").read_text())
        == result
        == json.loads((tmp_path / "result.json").read_text())
    )
    assert end_of(tmp_path / "gone", ExitStatus(3))["exit_code"] == 3
