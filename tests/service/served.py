"""A server process as a person starts it, and a client of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from ssl import PROTOCOL_TLS_CLIENT, SSLContext
from typing import Any

import httpx

from tests.session import ROOT
from tests.waiting import PATIENCE_SECONDS, wait_for

SPEC: dict[str, Any] = {
    "name": "digits",
    "model": {"kind": "mlp"},
    "data": {"kind": "digits"},
    "train": {"steps": 10_000},
    "checkpoint": {"every": 20},
}


@dataclass
class Served:
    """One server process and a client of it."""

    folder: Path
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._client: httpx.Client | None = None
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
        """Made once the server has said that it is up; each request has a connection of its own."""
        if self._client is None:
            port, token = (self.folder / "port").read_text().strip(), (self.folder / "token").read_text().strip()
            self._client = httpx.Client(
                base_url=f"http://127.0.0.1:{port}",
                headers={"Authorization": f"Bearer {token}"},
                timeout=PATIENCE_SECONDS,
                verify=SSLContext(PROTOCOL_TLS_CLIENT),  # the certificates of the world take 50 ms to read
                limits=httpx.Limits(max_keepalive_connections=0),  # an idle one may be closed as a request goes out
            )
        return self._client

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
        wait_for(lambda: self.job(job_id)["status"] in statuses, f"{statuses}", lambda: self.story(job_id))
        return self.job(job_id)

    def wait_step(self, job_id: str, step: int) -> None:
        reached = lambda: bool(self.job(job_id)["step"] >= step)  # noqa: E731
        wait_for(reached, f"step {step}", lambda: self.story(job_id))

    def story(self, job_id: str) -> str:
        """A job's state and events, for the message of a failure."""
        events = self.client.get(f"/v1/jobs/{job_id}/events").json()["items"]
        shown = self.job(job_id)
        lines = [f"{e['at']} {e['action']} {e['message']}" for e in reversed(events)]
        return "\n".join([f"{shown['status']} step {shown['step']} {shown['current_attempt']}", *lines])

    def kill(self) -> None:
        """SIGKILL; no error when it has ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=PATIENCE_SECONDS)


def command(only: str | None) -> list[str]:
    program = (
        f"from server.serve import serve; from server.settings import read_settings; serve(read_settings(), {only!r})"
    )
    return [sys.executable, "-u", "-c", program]


def begin(folder: Path, only: str | None = None, **settings: str) -> Served:
    """Start a server on a data folder; `settings` by their names."""
    given = {f"SHARDYARD_{name.upper()}": value for name, value in settings.items()}
    environment = {**os.environ, "SHARDYARD_DATA_DIR": str(folder), **given}
    process = subprocess.Popen(
        command(only), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return Served(folder, process)
