"""A service started as a user starts it, by the console script on a data folder; smoke and browser tests use it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest

from server.cli.client import Client, Json, find_server
from server.cli.errors import CommandError
from server.cli.follow import is_at_rest
from server.cli.spec_file import as_body
from server.controller.ray_head import stop_head
from tests.waiting import PATIENCE_SECONDS
from workers.spec import load_spec

SHARDYARD = str(Path(sys.executable).with_name("shardyard"))
START_SECONDS = STOP_SECONDS = PATIENCE_SECONDS
RUN_SECONDS = 2 * PATIENCE_SECONDS  # a command that follows a job
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass
class Service:
    """A running `shardyard serve`."""

    folder: Path
    process: subprocess.Popen[bytes]
    client: Client

    @property
    def url(self) -> str:
        """Where the dashboard is."""
        return self.client.address.url

    @property
    def login_link(self) -> str:
        """The link that `serve` prints."""
        return f"{self.url}/login?token={self.client.address.token}"

    def submit(self, spec: str | Json) -> str:
        """Submit a spec, as text or as JSON; the job's id."""
        body = as_body(load_spec(spec)) if isinstance(spec, str) else spec
        return str(self.client.post("/v1/jobs", body)["id"])

    def job(self, job_id: str) -> Json:
        """The job now."""
        view: Json = self.client.get(f"/v1/jobs/{job_id}")
        return view

    def wait(self, job_id: str, done: Callable[[Json], bool] = is_at_rest) -> Json:
        """The job once `done` holds; a job that ended without it fails the test with its reason."""
        for _ in self.client.changes(job_id, at_least_every_seconds=1.0):
            job = self.job(job_id)
            if done(job):
                return job
            if is_at_rest(job):
                pytest.fail(f"the job {job['status']}: {job['reason']}\n{job.get('error')}\n{self.log_tail()}")
        raise AssertionError("changes() never ends")

    @contextmanager
    def running(self, spec: Json) -> Iterator[str]:
        """A job that runs as long as the test needs it: killed at the end of the block, however that ends."""
        job_id = self.submit(spec)
        try:
            yield job_id
        finally:
            if not is_at_rest(self.job(job_id)):
                self.client.post(f"/v1/jobs/{job_id}/kill")
                self.wait(job_id)

    def start_again(self) -> None:
        """The next server on the same folder, in this one's place."""
        self.client.close()
        again = start(self.folder)
        self.process, self.client = again.process, again.client

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command against this service, stdout piped."""
        command = [SHARDYARD, *words, "--data-dir", str(self.folder)]
        return subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS)

    def log_tail(self) -> str:
        """The end of what the server said."""
        return (self.folder / "serve.out").read_text(errors="replace")[-3000:]


def start(folder: Path, environment: Mapping[str, str] = NOTHING) -> Service:
    """Start a service in and on a folder, with these variables too, and wait until it is ready."""
    (folder / "port").unlink(missing_ok=True)
    with (folder / "serve.out").open("ab") as output:
        process = subprocess.Popen(
            [SHARDYARD, "serve", "--data-dir", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
    try:
        return Service(folder, process, _ready(folder, process))
    except BaseException:
        process.kill()
        process.wait()
        stop_head(folder)
        raise


def _ready(folder: Path, process: subprocess.Popen[bytes]) -> Client:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            process.wait(0.05)
            pytest.fail(f"serve ended: {(folder / 'serve.out').read_text(errors='replace')[-3000:]}")
        except subprocess.TimeoutExpired:
            client = _try_connect(folder)
            if client is not None:
                return client
    pytest.fail(f"serve was not ready in time: {(folder / 'serve.out').read_text(errors='replace')[-3000:]}")


def _try_connect(folder: Path) -> Client | None:
    try:
        client = Client(find_server(None, None, folder))
    except CommandError:  # no port is written yet
        return None
    try:
        client.get("/readyz")
        return client
    except CommandError:
        client.close()
        return None


def stop(service: Service) -> None:
    """Ctrl-C, then `shardyard stop` for whatever is left."""
    try:
        interrupt(service)
    finally:
        command = [SHARDYARD, "stop", "--data-dir", str(service.folder)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        service.process.kill()


def interrupt(service: Service) -> int:
    """Ctrl-C; the exit code."""
    service.client.close()
    service.process.send_signal(signal.SIGINT)
    return service.process.wait(STOP_SECONDS)


def processes_naming(folder: Path) -> list[str]:
    """Living processes whose command line or first environment names the folder."""
    needle = os.fsencode(folder)
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it ended meanwhile, or it is somebody else's
            continue
        if needle in words and state not in "ZX" and int(entry.name) != os.getpid():
            found.append(f"{entry.name} {(entry / 'cmdline').read_bytes()!r}"[:200])
    return found
