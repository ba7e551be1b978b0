"""The whole service on a real Ray head: the same bits after every kind of interruption. (Ctrl-C: tests/smoke.)

Each job stands still at a gate while it is interrupted, so that it can not end before.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gated import STANDS_AFTER, STEPS, Gate
from tests.service.served import Served, begin
from tests.waiting import wait_for
from workers.process_table import ProcessId, identify

MEDDLE_AT = STANDS_AFTER - 2


class Home:
    """A data folder whose server is killed and started again in the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.served = self.start()
        self.reference = ""  # digest of an uninterrupted run

    def start(self) -> Served:
        self.served = begin(self.folder, data_roots=str(self.folder))
        self.served.wait_up()
        return self.served

    def submit(self, name: str) -> tuple[str, Gate]:
        """A job and its gate, shut."""
        gate = Gate(self.folder / f"{name}.gate")
        return self.served.submit(**gate.spec(name)), gate

    def digest(self, job: str) -> str:
        shown = self.served.wait_status(job, "succeeded", "failed")
        assert shown["status"] == "succeeded", shown["reason"]
        return str(shown["digest"])

    def uninterrupted(self) -> str:
        if not self.reference:
            job, gate = self.submit("whole")
            gate.open()
            self.reference = self.digest(job)
        return self.reference

    def attempt(self, job: str) -> dict[str, Any]:
        return dict(self.served.job(job)["current_attempt"])


@pytest.fixture(scope="module")
def home(ray_folder: Path) -> Iterator[Home]:
    built = Home(ray_folder)
    yield built
    built.served.kill()


def test_a_killed_rank_is_retried_from_the_last_checkpoint_to_the_same_bits(home: Home) -> None:
    """kill -9 of rank 1: one infrastructure failure, a second attempt, the digest of the uninterrupted run."""
    expected = home.uninterrupted()
    job, gate = home.submit("killed")
    home.served.wait_step(job, MEDDLE_AT)
    wait_for(lambda: bool(home.attempt(job)["rank_states"][1]["pid"]), "the pid is known")
    os.kill(home.attempt(job)["rank_states"][1]["pid"], signal.SIGKILL)
    gate.open()
    assert home.digest(job) == expected
    assert home.attempt(job)["number"] == 2 and home.attempt(job)["resumed_from_step"] > 0


def test_a_killed_server_is_replaced_under_the_training_job(home: Home) -> None:
    """kill -9 of the server: the job trains on, is adopted, one attempt in all, every step once, the same bits."""
    expected = home.uninterrupted()
    job, gate = home.submit("adopted")
    home.served.wait_step(job, MEDDLE_AT)
    home.served.kill()
    gate.open()
    home.start()
    assert home.digest(job) == expected
    assert home.attempt(job)["number"] == 1
    answer = home.served.client.get(f"/v1/jobs/{job}/metrics", params={"names": "loss", "width": 3000}).json()
    (series,) = answer["series"]
    assert [point["step"] for point in series["points"]] == list(range(1, STEPS + 1))


OWNED = ("sums", "master", "moments", "buckets", "slots", "pinned", "other")  # named alike in plans and samples


def test_the_plan_of_a_users_model_is_met_to_the_byte(home: Home) -> None:
    """At two stages that the spec names: what was predicted before the first step is what the ranks measured."""
    client = home.served.client
    for stage in (1, 3):
        gate = Gate(home.folder / f"planned at {stage}.gate")
        job = home.served.submit(**{**gate.spec(f"planned at {stage}"), "zero": {"stage": stage}})
        look = lambda part, job=job: client.get(f"/v1/jobs/{job}/{part}").json()  # noqa: E731
        wait_for(lambda look=look: look("plan")["status"] != "pending", "the plan is made")  # type: ignore[misc]
        predicted = look("plan")["predicted"]["stages"][stage]
        gate.open()
        assert home.digest(job)
        plan, memory, ledger = look("plan"), look("memory"), look("ledger")
        assert plan["predicted"]["stages"][stage] == predicted and plan["stage"] == stage
        assert predicted["memory"] == max(plan["memory"], key=lambda rank: sum(rank.values()))
        peaks = [
            {"parameters": sample["params"], "gradients": sample["grads"], **{name: sample[name] for name in OWNED}}
            for sample in memory["samples"]
            if sample["phase"] == "peak"
        ]
        largest = max(peaks, key=lambda peak: sum(peak.values()))
        assert {name: count for name, count in largest.items() if count} == {
            name: count for name, count in predicted["memory"].items() if count
        }
        busiest = max(ledger["ranks"], key=lambda rank: rank["measured_bytes"])
        sent = {entry["purpose"]: entry["measured_bytes"] for entry in busiest["entries"] if entry["measured_bytes"]}
        assert sent == {purpose: count for purpose, count in predicted["traffic"].items() if count}
        assert busiest["measured_bytes"] == predicted["total_traffic_bytes"]


PATIENT = """
import os, time
from pathlib import Path
from torch import nn

def build(gate, builders):
    with open(builders, "a") as file:
        print(os.getpid(), file=file)
    while not Path(gate).exists():
        time.sleep(0.01)
    return nn.Linear(64, 10)
"""


def test_a_server_that_is_killed_while_a_plan_is_made_makes_it_again(home: Home) -> None:
    """The first build ends with its server; the job, whose stage is automatic, starts with the plan of the second."""
    gate, builders = home.folder / "patient.gate", home.folder / "builders"
    code = home.folder / "patient"
    code.mkdir()
    (code / "patient.py").write_text(PATIENT)
    kwargs = {"gate": str(gate), "builders": str(builders)}
    model = {"kind": "python", "entry": "patient:build", "path": str(code), "kwargs": kwargs}
    job = home.served.submit(name="patient", model=model, train={"steps": 3}, resources={"ranks": 2})

    def built_by(count: int) -> ProcessId | None:
        pids = builders.read_text().split() if builders.exists() else []
        return identify(int(pids[-1])) if len(pids) == count else None

    first = wait_for(lambda: built_by(1), "the model is being built", lambda: home.served.story(job))
    assert first is not None
    home.served.kill()
    wait_for(lambda: not first.alive(), "the build ends with the server")
    home.start()
    wait_for(lambda: built_by(2), "it is built again", lambda: home.served.story(job))
    shown = home.served.job(job)
    assert (shown["status"], shown["reason"]["code"], shown["attempt"]) == ("queued", "being_planned", 0)
    gate.touch()
    assert home.digest(job)
    plan = home.served.client.get(f"/v1/jobs/{job}/plan").json()
    assert (plan["status"], plan["attempt"]) == ("done", 1) and plan["stage"] == plan["predicted"]["advised_stage"]
