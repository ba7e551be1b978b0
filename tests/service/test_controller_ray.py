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

from tests.gated import STANDS_AFTER, STEPS, Gate, told_to_stop
from tests.service.served import Served, begin
from tests.waiting import wait_for

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


def test_cancelled_and_resumed_on_one_rank_at_stage_3_it_ends_in_the_same_bits(home: Home) -> None:
    """Two ranks at stage 2 up to the cancel, one rank at stage 3 from there."""
    expected = home.uninterrupted()
    job, gate = home.submit("moved")
    home.served.wait_step(job, MEDDLE_AT)
    home.served.client.post(f"/v1/jobs/{job}/cancel")
    attempt = home.attempt(job)["id"]
    wait_for(lambda: told_to_stop(home.folder, attempt), "the ranks were told", lambda: home.served.story(job))
    gate.open()
    cancelled = home.served.wait_status(job, "cancelled")
    assert MEDDLE_AT <= cancelled["step"] < STEPS
    answer = home.served.client.post(f"/v1/jobs/{job}/resume", json={"ranks": 1, "zero": {"stage": 3}})
    assert answer.status_code == 200, answer.text
    assert home.digest(job) == expected


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
