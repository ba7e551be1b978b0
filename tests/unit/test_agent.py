"""The node agent without Ray: its zygote, and what it does for ranks whose actor died."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.service.report_sink import ReportSink
from tests.session import short_folder
from tests.waiting import wait_for
from workers import agent as agent_module
from workers import launch_register
from workers.agent import AgentPlan, NodeAgent, ZygoteFailed
from workers.launch_register import Entry, Register, rank_mark
from workers.process_table import ProcessId, marked, own_identity, wait_gone
from workers.rank_folders import RELEASED_FILE
from workers.rank_process import fork_rank

DEAD = ProcessId(own_identity().pid, 1)  # a reused pid: not alive


def new_agent(scratch: Path, entry: str = "zygote_bodies:run") -> NodeAgent:
    """An agent whose Ray does not exist: it has no idle workers to keep."""
    plan = AgentPlan("0123456789abcdef", "127.0.0.1:9", str(scratch), entry, "", (str(Path(__file__).parent),), 0)
    return NodeAgent(plan)


@pytest.fixture(scope="module")
def scratch() -> Path:
    """A folder with a short path, as the sockets need."""
    return short_folder("agent")


@pytest.fixture(scope="module")
def standing(scratch: Path) -> Iterator[NodeAgent]:
    made = new_agent(scratch)
    made.ensure_zygote()
    yield made
    made._end_zygote()


@pytest.fixture
def agent(standing: NodeAgent) -> Iterator[NodeAgent]:
    """The agent of this file, knowing no rank."""
    yield standing
    standing.register.forget("attempt")
    standing.senders.clear()


def entry(agent: NodeAgent, folder: Path, sink: ReportSink, actor: ProcessId = DEAD) -> Entry:
    """A rank of a dead actor, as the actor wrote it down."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Entry("job", "attempt", 1, 0, str(folder), sink.url, "token", actor)
    agent.register.write(made)
    return made


def test_a_zygote_is_kept_while_it_answers_and_replaced_when_it_died_or_the_code_changed(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade under a running head must not start ranks with yesterday's code."""
    first = agent.ensure_zygote()["zygote"]
    assert agent.ensure_zygote()["zygote"] == first
    os.kill(first["pid"], signal.SIGKILL)
    second = wait_for(lambda: (z := agent.ensure_zygote()["zygote"])["pid"] != first["pid"] and z)
    monkeypatch.setattr(agent_module, "code_mark", lambda: "tomorrow's")
    third = agent.ensure_zygote()["zygote"]
    assert third["pid"] not in (first["pid"], second["pid"]) and third["code"] == "tomorrow's"
    assert wait_gone(ProcessId(second["pid"], second["start_ticks"]), 60.0)


def test_a_zygote_that_cannot_start_says_why(scratch: Path) -> None:
    """Its last words are in the error and in every ping."""
    broken = new_agent(scratch / "broken", entry="no_such_module:run")
    with pytest.raises(ZygoteFailed, match="no_such_module"):
        broken.ensure_zygote()
    wait_for(lambda: "no_such_module" in broken.ping()["failure"])


def test_what_a_dead_actor_left_is_sent_and_said_once(agent: NodeAgent, tmp_path: Path) -> None:
    """Spool, output and the end of a rank that nobody saw end."""
    sink, folder = ReportSink(), tmp_path / "attempt" / "0"
    folder.mkdir(parents=True)
    points = {"kind": "points", "at": "2026-11-01T12:00:00Z", "step": 4, "values": {"loss": 1.0}}
    (folder / "spool.jsonl").write_text(json.dumps(points) + "\n" + '{"kind": "poi')
    (folder / "output.log").write_text("last words")
    entry(agent, folder, sink)
    wait_for(lambda: agent.lost_ranks()[0]["reports_closed"])
    assert sink.steps("attempt", 0) == [4] and sink.output("attempt", 0) == "last words"
    assert [result["outcome"] for result in sink.results("attempt", 0)] == ["died"]
    (lost,) = agent.lost_ranks()
    assert (lost["status"], lost["step"], lost["reports_closed"]) == ("lost", 4, True)
    sink.close()


def test_a_rank_that_had_finished_is_exited_not_lost(agent: NodeAgent, tmp_path: Path) -> None:
    """Its own word stands, whatever became of its actor."""
    sink = ReportSink()
    made = entry(agent, tmp_path / "attempt" / "0", sink)
    result = {"kind": "result", "at": "2026-11-01T12:00:00Z", "outcome": "finished", "step": 9}
    (Path(made.folder) / "result.json").write_text(json.dumps(result))
    (lost,) = agent.lost_ranks()
    assert lost["status"] == "exited" and lost["result"] == result
    sink.close()


def test_reports_of_a_living_actor_are_left_to_it(agent: NodeAgent, tmp_path: Path) -> None:
    """Two senders of one rank would race."""
    sink = ReportSink()
    entry(agent, tmp_path / "attempt" / "0", sink, actor=own_identity())
    assert agent.lost_ranks() == []
    agent._look_around()
    assert sink.num_requests == 0
    sink.close()


def test_a_sweep_ends_what_is_left_and_forgets_it(agent: NodeAgent, tmp_path: Path) -> None:
    """Also processes in sessions of their own; the folder is marked as released."""
    sink, zygote = ReportSink(), agent.ensure_zygote()["zygote"]
    made = entry(agent, tmp_path / "attempt" / "0", sink)
    ready = tmp_path / "ready"
    order = Path(made.folder) / "order.json"
    order.write_text(json.dumps({"act": "stay", "ready": str(ready)}))
    rank = fork_rank(zygote["socket_path"], order, rank_mark("attempt", 0), {"GIVEN": "yes"}, None)
    wait_for(lambda: ready.exists() or rank.ended())  # the agent's own look may be faster
    agent.sweep("attempt")
    assert rank.ended(60.0) and list(marked({"SHARDYARD_ATTEMPT": "attempt"})) == []
    rank.collect()
    assert agent.lost_ranks() == [] and (Path(made.folder) / RELEASED_FILE).exists()
    sink.close()


def test_an_entry_that_is_forgotten_while_it_is_changed_stays_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's look and a sweep meet: a rank that was swept is not found lost ever after."""
    register = Register(tmp_path)
    register.write(Entry("job", "attempt", 1, 0, "/folder", "url", "token", DEAD))
    forgetting = threading.Thread(target=register.forget, args=("attempt",))
    write = launch_register.write_atomically

    def write_late(path: Path, text: str) -> None:
        forgetting.start()
        forgetting.join(0.5)
        write(path, text)

    monkeypatch.setattr(launch_register, "write_atomically", write_late)
    register.update("attempt", 0, closed=True)
    forgetting.join()
    assert list(register.entries()) == []
    register.update("attempt", 0, closed=True)
    assert list(register.entries()) == []


def test_a_sweep_waits_for_an_actor_that_lives(
    agent: NodeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could still fork a rank: nothing is forgotten, the release is tried again."""
    monkeypatch.setattr(agent_module, "SWEEP_SECONDS", 0.05)
    sink = ReportSink()
    entry(agent, tmp_path / "attempt" / "0", sink, actor=own_identity())
    with pytest.raises(TimeoutError, match="lives on"):
        agent.sweep("attempt")
    assert list(agent.register.entries("attempt"))
    sink.close()


def test_the_register_survives_torn_files_and_follows_a_moved_server(tmp_path: Path) -> None:
    """One unreadable entry hides no other; a new address is kept."""
    register = Register(tmp_path)
    entries = [Entry("job", "attempt", 1, rank, "/x", "http://old", "token", DEAD) for rank in range(2)]
    for item in entries:
        register.write(item)
    (tmp_path / "attempt.7.json").write_text('{"job_id": ')
    register.redirect("attempt", "http://new")
    assert list(register.entries()) == [replace(item, report_url="http://new") for item in entries]
    assert register.read("attempt", 1) == replace(entries[1], report_url="http://new")
    register.forget("attempt")
    assert list(register.entries()) == []
