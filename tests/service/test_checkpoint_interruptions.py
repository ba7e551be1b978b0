"""The whole service on a real Ray head, interrupted while it loads, saves, reads back, removes or forks checkpoints.

A model of a user's own has a rank stand in its load or in its save for as long as a gate, a file, is missing: nothing
depends on who is faster.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.controller.retention import ALWAYS_KEPT
from tests.running_service import SHARDYARD
from tests.service.served import Served, begin
from tests.waiting import PATIENCE_SECONDS, wait_for
from workers.contract import ENVIRONMENT_MARK, SPOOL_FILE
from workers.process_table import PROC, ProcessId, identify, marked, send_signal
from zero_engine.catalog import TOMBSTONE, list_checkpoints, verify
from zero_engine.store import LocalStore

STEPS, EVERY = 40, 10
MODEL = """
import time
from pathlib import Path

from torch import nn

from zero_engine.state import Subject
from zero_engine.store import LocalStore


def stand(owner, name, gate):
    method = getattr(owner, name)

    def late(self, *given, **named):
        while not Path(gate).exists():
            time.sleep(0.01)
        return method(self, *given, **named)

    setattr(owner, name, late)


def build(load, save):
    stand(LocalStore, "read_parts", load)
    stand(Subject, "digest_part", save)  # a shard gets no name before its values were looked at
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
"""


SOAK = pytest.mark.soak


@dataclass(frozen=True)
class Gates:
    """Files of one job: without `load` its ranks stand in a load, without `save` in a save."""

    load: Path
    save: Path

    def open(self) -> None:
        self.load.touch()
        self.save.touch()


class Home:
    """A data folder whose server is killed and started again in the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.served = self.start()
        self.jobs = dict[str, str]()  # by name, of undisturbed runs
        self.digest = ""

    def start(self, **settings: str) -> Served:
        self.served = begin(self.folder, data_roots=str(self.folder), **settings)
        self.served.wait_up()
        return self.served

    def again(self, **settings: str) -> Served:
        """kill -9, and the next server."""
        self.served.kill()
        return self.start(**settings)

    def submit(self, name: str, steps: int = STEPS, every: int = EVERY, keep_latest: int = 8) -> tuple[str, Gates]:
        """A job and its gates, shut."""
        gates = Gates(self.folder / f"{name}.load", self.folder / f"{name}.save")
        code = self.folder / "interrupted"
        code.mkdir(exist_ok=True)
        (code / "interrupted.py").write_text(MODEL)
        kwargs = {"load": str(gates.load), "save": str(gates.save)}
        model = {"kind": "python", "entry": "interrupted:build", "path": str(code), "kwargs": kwargs}
        train = {"steps": steps, "global_batch": 16, "micro_batch": 4, "eval": {"every": 0}}
        train |= {"schedule": {"kind": "constant"}}
        keep = {"every": every, "keep_latest": keep_latest}
        spec = {"model": model, "train": train, "zero": {"stage": 2}, "resources": {"ranks": 2}, "checkpoint": keep}
        return self.served.submit(name=name, **spec), gates

    def whole(self) -> str:
        """The digest of an undisturbed run."""
        if not self.digest:
            self.jobs["whole"], gates = self.submit("whole")
            gates.open()
            self.digest = self.ended(self.jobs["whole"])["digest"]
        return self.digest

    def ended(self, job: str) -> dict[str, Any]:
        """The job once it has succeeded, with nothing left behind: processes, half saves, damaged or stray files."""
        shown = self.served.wait_status(job, "succeeded", "failed")
        assert shown["status"] == "succeeded", self.served.story(job)
        for attempt in self.get(f"/v1/jobs/{job}/attempts")["items"]:
            assert list(marked({ENVIRONMENT_MARK: attempt["id"]})) == []
        store = self.store(job)
        published = lambda: [name.folder for name in list_checkpoints(store)]  # noqa: E731
        listed = lambda: [item["folder"] for item in checkpoints(self, job)]  # noqa: E731
        tidy = lambda: sorted(store.folders()) == sorted(published()) == sorted(listed())  # noqa: E731
        wait_for(tidy, "the store holds what is listed", lambda: (list(store.folders()), listed()))
        assert all(verify(store, folder).ok for folder in published())
        assert list(store.root.rglob(".tmp-*")) == []
        return shown

    def store(self, job: str) -> LocalStore:
        return LocalStore(self.folder / "checkpoints" / job)

    def get(self, path: str) -> dict[str, Any]:
        return dict(self.served.client.get(path).json())

    def rank(self, job: str, number: int, phase: str) -> ProcessId:
        """A rank's process, once it and all others are in a phase."""

        def look() -> ProcessId | None:
            states = (self.served.job(job)["current_attempt"] or {}).get("rank_states", [])
            if not states or any(state["phase"] != phase or not state["pid"] for state in states):
                return None
            return identify(states[number]["pid"])

        found = wait_for(look, f"all ranks are {phase}", lambda: self.served.story(job))
        assert found is not None
        return found


@pytest.fixture(scope="module")
def home(ray_folder: Path) -> Iterator[Home]:
    built = Home(ray_folder)
    yield built
    built.served.kill()


def stands_stopped(process: ProcessId) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def stopped(process: ProcessId) -> None:
    """SIGSTOP."""
    assert send_signal(process, signal.SIGSTOP)
    wait_for(lambda: stands_stopped(process), "it is stopped")


def in_its_load(home: Home, name: str) -> tuple[str, ProcessId, Gates]:
    """A job whose second attempt stands in the load of step 20, and its rank 1."""
    job, gates = home.submit(name, steps=STEPS // 2)
    gates.save.touch()
    home.ended(job)
    answer = home.served.client.post(f"/v1/jobs/{job}/resume", json={"train": {"steps": STEPS}})
    assert answer.status_code == 200, answer.text
    return job, home.rank(job, 1, "restoring"), gates


@SOAK
def test_a_rank_that_stands_still_in_a_load_goes_on_where_it_was(home: Home) -> None:
    """SIGSTOP, and SIGCONT once its peer waits for it: one attempt, the bits of an undisturbed run."""
    expected = home.whole()
    job, rank, gates = in_its_load(home, "load goes on")
    stopped(rank)
    gates.open()
    assert home.served.job(job)["status"] == "starting"
    assert send_signal(rank, signal.SIGCONT)
    shown = home.ended(job)
    assert (shown["digest"], shown["attempt"]) == (expected, 2)


QUICK = {"no_progress_seconds": "15", "unreachable_seconds": "5"}


def ended_although_stopped(home: Home, job: str, rank: ProcessId, gates: Gates) -> dict[str, Any]:
    """The job, of which a rank stood still until it was ended for that."""
    stopped(rank)
    gates.open()
    home.again(**QUICK)
    wait_for(lambda: not rank.alive(), "the stopped rank is ended", lambda: home.served.story(job))
    home.again()
    return home.ended(job)


@SOAK
def test_a_rank_that_stays_stopped_in_a_load_is_ended_and_its_job_tried_again(home: Home) -> None:
    """It is told as silent, no fault of the user; the next attempt loads the same checkpoint."""
    expected = home.whole()
    job, rank, gates = in_its_load(home, "load stays")
    shown = ended_although_stopped(home, job, rank, gates)
    assert (shown["digest"], shown["attempt"]) == (expected, 3)
    ended = [each["reason"]["code"] for each in home.get(f"/v1/jobs/{job}/attempts")["items"] if each["number"] == 2]
    assert ended == ["rank_silent"]
    assert shown["current_attempt"]["resumed_from_step"] == STEPS // 2


def in_its_save(home: Home, name: str) -> tuple[str, ProcessId, Gates]:
    """A job that stands in its first save, beside its training, and its rank 1."""
    job, gates = home.submit(name)
    home.served.wait_step(job, EVERY)
    rank = home.rank(job, 1, "saving")  # the next save is due, and waits for the first
    return job, rank, gates


@SOAK
def test_a_rank_that_stands_still_in_a_save_goes_on_where_it_was(home: Home) -> None:
    """SIGSTOP: the other rank's shard is durable and nothing is published; SIGCONT: one attempt, the same bits."""
    expected = home.whole()
    job, rank, gates = in_its_save(home, "save goes on")
    stopped(rank)
    gates.open()
    record = home.store(job).root / f"step-{EVERY:010d}-attempt-000001" / "rank-00000.json"
    wait_for(record.exists, "rank 0's shard is durable", lambda: home.served.story(job))
    assert list_checkpoints(home.store(job)) == ()
    assert send_signal(rank, signal.SIGCONT)
    shown = home.ended(job)
    assert (shown["digest"], shown["attempt"]) == (expected, 1)
    assert len(list_checkpoints(home.store(job))) == STEPS // EVERY


def test_a_rank_that_stays_stopped_in_a_save_leaves_nothing_of_it(home: Home) -> None:
    """No checkpoint was published: the next attempt begins anew, and the half save goes with the first."""
    expected = home.whole()
    job, rank, gates = in_its_save(home, "save stays")
    shown = ended_although_stopped(home, job, rank, gates)
    assert (shown["digest"], shown["attempt"]) == (expected, 2)
    assert {name.fence for name in list_checkpoints(home.store(job))} == {2}


def checkpoints(home: Home, job: str) -> list[dict[str, Any]]:
    """Oldest first, without removed ones."""
    items = home.get(f"/v1/jobs/{job}/checkpoints?limit=100")["items"]
    return sorted(items, key=lambda item: (item["attempt"], item["step"]))


def orphans(home: Home, job: str) -> list[Any]:
    """What of this job nothing refers to."""
    return [item for item in home.get("/v1/store/orphans")["items"] if job in str(item)]


def test_a_reading_back_that_its_server_did_not_survive_is_finished_by_the_next(home: Home) -> None:
    """kill -9 between two shards of a checkpoint: in the end all are verified, nothing is marked bad."""
    home.again(scrub_bytes_per_second="0")
    job, gates = home.submit("read back")
    gates.open()
    home.ended(job)
    assert {item["status"] for item in checkpoints(home, job)} == {"complete"}
    home.again(scrub_bytes_per_second="4000")

    def cut() -> bool:
        items = home.get(f"/v1/jobs/{job}/checkpoints?shards=true")["items"]
        read = [sum(shard["verified_at"] is not None for shard in item["shards"]) for item in items]
        return 1 in read

    wait_for(cut, "one shard of two was read back", lambda: checkpoints(home, job))
    home.again()
    wait_for(lambda: {item["status"] for item in checkpoints(home, job)} == {"verified"}, "all are read back")
    assert orphans(home, job) == []


def removal_begun(store: LocalStore) -> bool:
    return any(store.root.rglob(TOMBSTONE))


def test_a_removal_that_its_server_did_not_survive_is_finished_by_the_next(home: Home) -> None:
    """kill -9 as a checkpoint is being removed, again and again; then as the whole job is."""
    job, gates = home.submit("removed", every=1, keep_latest=2)
    gates.open()
    store = home.store(job)
    for _ in range(3):
        wait_for(lambda: removal_begun(store), "a checkpoint is being removed", lambda: home.served.story(job))
        home.again()
    shown = home.ended(job)
    kept = lambda: len(list(store.folders())) <= 2 * ALWAYS_KEPT  # noqa: E731  # the newest, and the newest read back
    wait_for(kept, "the others are removed", lambda: checkpoints(home, job))
    assert shown["attempt"] == 1 and orphans(home, job) == []
    assert home.served.client.delete(f"/v1/jobs/{job}").status_code == 202
    home.again()
    wait_for(lambda: home.served.client.get(f"/v1/jobs/{job}").status_code == 404, "the job is gone")
    assert not store.root.exists() and orphans(home, job) == []


def helper(home: Home) -> ProcessId:
    """The server's process that talks to Ray."""
    for entry in PROC.glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            ours = parent == home.served.process.pid and b"ray_driver" in (entry / "cmdline").read_bytes()
        except OSError:  # it ended meanwhile
            continue
        if ours and (found := identify(int(entry.name))) is not None:
            return found
    raise AssertionError("the server has no driver")


@pytest.mark.parametrize("moment", [pytest.param("asked", marks=SOAK), pytest.param("starting", marks=SOAK), "helper"])
def test_a_fork_begins_once_and_at_its_origin_whatever_dies_at_its_start(home: Home, moment: str) -> None:
    """kill -9 of the server when the fork was asked for or launched, or of its process for Ray: one job, one branch."""
    expected = home.whole()
    parent = home.jobs["whole"]
    origin = next(item for item in checkpoints(home, parent) if item["step"] == STEPS // 2)

    def ask() -> dict[str, Any]:
        body, headers = {"checkpoint": origin["id"], "name": moment}, {"Idempotency-Key": f"fork {moment}"}
        return dict(home.served.client.post(f"/v1/jobs/{parent}/fork", json=body, headers=headers).json())

    job = str(ask()["id"])
    if moment != "asked":
        home.served.wait_status(job, "starting", "running")
    if moment == "helper":
        assert send_signal(helper(home), signal.SIGKILL)
    else:
        home.again()
    assert ask()["id"] == job
    shown = home.ended(job)
    assert shown["digest"] == expected
    begun = [each["resumed_from_step"] for each in home.get(f"/v1/jobs/{job}/attempts")["items"]]
    assert set(begun) - {None} and all(step is None or step >= STEPS // 2 for step in begun)
    assert home.served.job(parent)["status"] == "succeeded"
    assert (
        len([each for each in home.get(f"/v1/jobs/{parent}/checkpoints")["items"] if each["id"] == origin["id"]]) == 1
    )
    assert orphans(home, job) == []


def test_questions_that_die_with_their_server_change_nothing(home: Home) -> None:
    """kill -9 among preflights and verifications: those asked again are answered as before, none marked."""
    home.whole()
    job = home.jobs["whole"]
    newest = checkpoints(home, job)[-1]
    questions = [f"/v1/jobs/{job}/preflight", f"/v1/checkpoints/{newest['id']}/verify"]
    more = {"train": {"steps": 2 * STEPS}, "ranks": 1}

    def ask(path: str) -> dict[str, Any]:
        answer = home.served.client.post(path, json=more if path.endswith("preflight") else None)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    before = [ask(path) for path in questions]
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask, path) for _ in range(30) for path in questions]
        next(as_completed(asked)).result()
        home.served.kill()
    lost = [each for each in asked if isinstance(each.exception(), httpx.HTTPError)]
    assert lost, "some were still open"
    home.start()
    after = [ask(path) for path in questions]
    assert after[0] == before[0] and after[1]["ok"] and before[1]["ok"]
    assert [item["status"] for item in checkpoints(home, job)][-1] == "verified" and orphans(home, job) == []


def in_load(temporary: Path) -> list[Path]:
    """Spools of local ranks that have said that they restore."""
    spools = temporary.glob(f"shardyard-verify-*/**/{SPOOL_FILE}")
    return [spool for spool in spools if b'"restoring"' in spool.read_bytes()]


def children(pid: int) -> list[ProcessId]:
    found = (PROC / str(pid) / "task" / str(pid) / "children").read_text().split()
    return [process for each in found if (process := identify(int(each))) is not None]


def verify_resume(home: Home, job: str, temporary: Path) -> subprocess.Popen[str]:
    """`shardyard verify-resume` from step 20, with temporary files of its own."""
    start = next(item["folder"] for item in checkpoints(home, job) if item["step"] == STEPS // 2)
    words = ["verify-resume", job, "--from", start, "--json", "--data-dir", str(home.folder)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    return subprocess.Popen([SHARDYARD, *words], env=environment, stdout=subprocess.PIPE, text=True)


def test_steps_are_made_again_whatever_becomes_of_the_server_and_end_with_their_command(
    home: Home, tmp_path: Path
) -> None:
    """kill -9 of the server: the verdict comes all the same. kill -9 of the command: its ranks end with it, the next
    one removes its folder, and the job's store is as it was.
    """
    home.whole()
    job, load = home.jobs["whole"], home.folder / "whole.load"
    kept = sorted(path.name for path in home.store(job).root.rglob("*"))
    left = lambda: [path.name for path in tmp_path.iterdir() if not path.name.startswith("torch")]  # noqa: E731

    def standing() -> subprocess.Popen[str]:
        load.unlink()
        process = verify_resume(home, job, tmp_path)
        wait_for(lambda: len(in_load(tmp_path)) == 2, "its ranks stand in the load", process.poll)
        return process

    first = standing()
    home.again()
    load.touch()
    said, _ = first.communicate(timeout=PATIENCE_SECONDS)
    assert first.returncode == 0 and json.loads(said)["verdict"] == "bit-exact", said
    assert left() == []

    second = standing()
    forks = children(second.pid)
    assert len(forks) == 2
    second.kill()
    second.wait()
    for fork in forks:
        wait_for(lambda fork=fork: not fork.alive(), "a rank ends with the command")  # type: ignore[misc]
    load.touch()
    third = verify_resume(home, job, tmp_path)
    assert third.wait(PATIENCE_SECONDS) == 0
    assert left() == []
    assert sorted(path.name for path in home.store(job).root.rglob("*")) == kept
