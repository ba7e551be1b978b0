"""`serve` as a process, with simulated ranks: start, Ctrl-C, restart, refusals, the two halves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.service.served import Served, begin
from tests.session import ROOT
from tests.waiting import PATIENCE_SECONDS, wait_for

Start = Callable[..., Served]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server on a data folder; every one is ended with the test."""
    running: list[Served] = []

    def start_one(folder: Path = tmp_path / "data", only: str | None = None, **settings: str) -> Served:
        running.append(begin(folder, only, fake_cluster="true", **settings))
        return running[-1]

    yield start_one
    for served in running:
        served.kill()


def test_ctrl_c_pauses_what_runs_and_the_next_start_resumes_exactly_that(start: Start) -> None:
    """A person's own pause stays; SIGTERM does the same as Ctrl-C; nothing of torch or ray is in the process."""
    first = start()
    first.wait_up()
    assert "/login?token=" in first.output
    running, mine = first.submit(), first.submit(name="mine")
    first.wait_step(running, 2)
    first.wait_step(mine, 2)
    first.client.post(f"/v1/jobs/{mine}/pause")
    first.wait_status(mine, "paused")
    maps = Path(f"/proc/{first.process.pid}/maps").read_text()
    assert "libtorch" not in maps and "_raylet" not in maps
    assert first.end(signal.SIGINT) == 0
    assert not (first.folder / "port").exists()

    second = start()
    second.wait_up()
    second.wait_status(running, "running")
    assert second.job(running)["attempt"] == 2
    assert second.job(mine)["status"] == "paused"
    assert second.end(signal.SIGTERM) == 0
    assert "Stopped." in second.output


def test_a_second_ctrl_c_leaves_at_once_and_a_killed_server_loses_no_job(start: Start) -> None:
    """The same for the jobs: simulated ranks die with their process, and the next start retries them."""
    first = start()
    first.wait_up()
    job = first.submit(stop_grace_seconds=3600.0, train={"steps": 100_000})
    first.wait_step(job, 25)
    first.process.send_signal(signal.SIGINT)
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(timeout=PATIENCE_SECONDS) in (0, 130)

    def running_again(served: Served, attempt: int) -> None:
        def again() -> bool:  # "running" alone may be what the dead server wrote
            shown = served.job(job)
            return bool(shown["attempt"] >= attempt and shown["status"] == "running")

        wait_for(again, f"attempt {attempt} runs", lambda: served.story(job))

    second = start()
    second.wait_up()
    running_again(second, attempt=2)
    second.process.kill()
    second.process.wait()

    third = start()
    third.wait_up()
    running_again(third, attempt=3)


def test_what_is_in_use_is_refused_with_one_line_and_exit_code_2(start: Start, tmp_path: Path) -> None:
    """The data folder and the port; nothing else changes for who holds them."""
    holder = start()
    holder.wait_up()
    environment = {**os.environ, "SHARDYARD_FAKE_CLUSTER": "true"}

    def refused(folder: Path, port: int | None) -> str:
        extra = {"SHARDYARD_DATA_DIR": str(folder), **({"SHARDYARD_PORT": str(port)} if port else {})}
        run = subprocess.run(
            [sys.executable, "-m", "server.serve"],
            cwd=ROOT,
            env={**environment, **extra},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert run.returncode == 2, run
        (line,) = run.stderr.splitlines()
        return line

    assert str(holder.process.pid) in refused(holder.folder, None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"Port {port} is in use" in refused(tmp_path / "other", port)
    assert holder.client.get("/healthz").status_code == 200


def test_api_and_controller_in_two_processes_share_only_the_database(start: Start, tmp_path: Path) -> None:
    """As compose runs them: the API takes the job while no controller is there, and the controller finds it."""
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    api = start(tmp_path / "api", "api", database_url=url)
    api.wait_up()
    job = api.submit(train={"steps": 30})
    assert api.job(job)["status"] == "queued"
    port = (api.folder / "port").read_text().strip()
    controller = start(tmp_path / "c", "controller", database_url=url, public_url=f"http://127.0.0.1:{port}")
    api.wait_status(job, "succeeded")
    assert controller.end(signal.SIGTERM) == 0
    assert api.client.get("/readyz").status_code in (200, 503)
    assert api.end(signal.SIGTERM) == 0
