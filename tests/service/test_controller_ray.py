"""The whole service on a real Ray head: the same bits after every kind of interruption, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.controller.ray_head import HEAD_MARK, _mark, find_head, stop_head
from tests.service.served import Served, begin, wait_for
from workers.process_table import marked

STEPS = 150
MODEL = {"kind": "mlp", "hidden": [512, 512, 256]}  # slow enough to be interrupted
TRAIN = {"steps": STEPS, "eval": {"every": 0}}


class Home:
    """A data folder whose server is killed and started again in the tests."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sy-home-"))
        self.served = self.start()
        self.reference = ""  # digest of an uninterrupted run

    def start(self) -> Served:
        self.served = begin(self.folder)
        self.served.wait_up()
        return self.served

    def submit(self, **changes: Any) -> str:
        spec = {
            "model": MODEL,
            "train": TRAIN,
            "zero": {"stage": 2},
            "checkpoint": {"every": 20},
            "stop_grace_seconds": 30.0,
        }
        return self.served.submit(**{**spec, **changes})

    def digest(self, job: str) -> str:
        shown = self.served.wait_status(job, "succeeded", "failed")
        assert shown["status"] == "succeeded", shown["reason"]
        return str(shown["digest"])

    def uninterrupted(self) -> str:
        if not self.reference:
            self.reference = self.digest(self.submit(name="whole"))
        return self.reference

    def ranks(self, job: str) -> list[dict[str, Any]]:
        return list(self.served.job(job)["current_attempt"]["rank_states"])

    def close(self) -> None:
        self.served.kill()
        stop_head(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    built = Home()
    yield built
    built.close()


def test_cancelled_and_resumed_on_one_rank_at_stage_3_it_ends_in_the_same_bits(home: Home) -> None:
    """Two ranks at stage 2 up to the cancel, one rank at stage 3 from there."""
    expected = home.uninterrupted()
    job = home.submit(name="moved")
    home.served.wait_step(job, 30)
    home.served.client.post(f"/v1/jobs/{job}/cancel")
    cancelled = home.served.wait_status(job, "cancelled", "succeeded")
    assert cancelled["status"] == "cancelled"
    answer = home.served.client.post(f"/v1/jobs/{job}/resume", json={"ranks": 1, "zero": {"stage": 3}})
    assert answer.status_code == 200, answer.text
    assert home.digest(job) == expected


def test_a_killed_rank_is_retried_from_the_last_checkpoint_to_the_same_bits(home: Home) -> None:
    """kill -9 of rank 1: one infrastructure failure, a second attempt, the digest of the uninterrupted run."""
    expected = home.uninterrupted()
    job = home.submit(name="killed")
    home.served.wait_status(job, "running")
    wait_for(lambda: bool(home.ranks(job)[1]["pid"]), "the pid is known")
    pid = home.ranks(job)[1]["pid"]
    home.served.wait_step(job, 22)
    os.kill(pid, signal.SIGKILL)
    assert home.digest(job) == expected
    assert home.served.job(job)["attempt"] == 2


def test_a_killed_server_is_replaced_under_the_training_job(home: Home) -> None:
    """kill -9 of the server: the job is adopted, one attempt in all, every step once, the same bits."""
    expected = home.uninterrupted()
    job = home.submit(name="adopted")
    home.served.wait_step(job, 10)
    home.served.kill()
    home.start()
    assert home.digest(job) == expected
    shown = home.served.job(job)
    assert shown["attempt"] == 1
    answer = home.served.client.get(f"/v1/jobs/{job}/metrics", params={"names": "loss", "width": 3000}).json()
    (series,) = answer["series"]
    assert [point["step"] for point in series["points"]] == list(range(1, STEPS + 1))


def test_ctrl_c_leaves_no_process_and_the_next_start_goes_on_to_the_same_bits(home: Home) -> None:
    """Jobs paused, the head stopped, nothing with its mark in /proc; then resumed by itself."""
    expected = home.uninterrupted()
    job = home.submit(name="stopped")
    home.served.wait_step(job, 10)
    assert home.served.end(signal.SIGINT) == 0
    assert find_head(home.folder) is None
    assert list(marked({HEAD_MARK: _mark(home.folder)})) == []
    home.start()
    assert home.digest(job) == expected
    assert home.served.job(job)["attempt"] == 2
