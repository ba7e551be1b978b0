"""`serve` as a process, with simulated ranks: start, Ctrl-C, restart, refusals, the two halves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60.0
SPEC: dict[str, Any] = {
    "name": "digits",
    "model": {"kind": "mlp"},
    "data": {"kind": "digits"},
    "train": {"steps": 10_000},
    "checkpoint": {"every": 20},
}
LIVE = ("starting", "running", "stopping")


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Until it holds."""
    deadline, pause = time.monotonic() + PATIENCE_SECONDS, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        pause.wait(0.05)


@dataclass
class Served:
    """One server process and a client of it."""

    folder: Path
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += (line.rstrip() for line in self.process.stdout)  # grows as lines come

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @property
    def client(self) -> httpx.Client:
        port, token = (self.folder / "port").read_text().strip(), (self.folder / "token").read_text().strip()
        return httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {token}"})

    def wait_up(self) -> None:
        def up() -> bool:
            assert self.process.poll() is None, self.output
            if "Log in:" not in self.output:
                return False  # the port file may still be that of a killed server
            try:
                return self.client.get("/healthz").status_code == 200
            except (OSError, httpx.HTTPError):
                return False

        wait_for(up, "the API answers")

    def submit(self, **changes: Any) -> str:
        answer = self.client.post("/v1/jobs", json={**SPEC, **changes})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.client.get(f"/v1/jobs/{job_id}").json())

    def wait_status(self, job_id: str, *statuses: str) -> dict[str, Any]:
        wait_for(lambda: self.job(job_id)["status"] in statuses, f"{statuses}")
        return self.job(job_id)

    def wait_step(self, job_id: str, step: int) -> None:
        wait_for(lambda: bool(self.job(job_id)["step"] >= step), f"step {step}")

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=PATIENCE_SECONDS)


Start = Callable[..., Served]


def command(only: str | None) -> list[str]:
    program = (
        f"from server.serve import serve; from server.settings import read_settings; serve(read_settings(), {only!r})"
    )
    return [sys.executable, "-u", "-c", program]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server on a data folder; every one is ended with the test."""
    running: list[Served] = []

    def begin(folder: Path = tmp_path / "data", only: str | None = None, **settings: str) -> Served:
        given = {f"SHARDYARD_{name.upper()}": value for name, value in settings.items()}
        environment = {**os.environ, "SHARDYARD_DATA_DIR": str(folder), "SHARDYARD_FAKE_CLUSTER": "true", **given}
        process = subprocess.Popen(
            command(only), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        served = Served(folder, process)
        running.append(served)
        return served

    yield begin
    for served in running:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait()


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

    second = start()
    second.wait_up()
    second.wait_status(job, "running")
    second.process.kill()
    second.process.wait()

    third = start()
    third.wait_up()

    def again() -> bool:
        shown = third.job(job)
        return bool(shown["attempt"] >= 3 and shown["status"] == "running")

    try:
        wait_for(again, "retried under the third server")
    except AssertionError:
        print(third.job(job)["status"], third.job(job)["reason"], third.job(job)["attempt"], third.output)
        print(
            [(e["at"], e["action"], e["message"]) for e in third.client.get(f"/v1/jobs/{job}/events").json()["items"]]
        )
        raise


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
