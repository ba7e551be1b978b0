"""A job whose checkpoints live in S3, from submit to resume, with the store away in the middle of it."""

from __future__ import annotations

import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from server.controller.ray_head import find_head
from tests.gated import CHECKPOINT_EVERY, STEPS, Gate
from tests.running_service import Service, start, stop
from tests.session import short_folder
from tests.unit.s3_by_hand import CREDENTIALS, S3Server
from tests.waiting import wait_for
from workers.object_store import open_store
from zero_engine.catalog import list_checkpoints, verify

SECRETS = (CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"])
CHUNK = 1 << 16


class Door(socketserver.ThreadingTCPServer):
    """In front of the store's port; while it is shut, whoever comes is turned away."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Visit)
        self.behind, self.shut, self.turned_away = port, threading.Event(), 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Visit(socketserver.BaseRequestHandler):
    """One connection, carried both ways until an end closes or the door is shut."""

    server: Door
    request: socket.socket

    def handle(self) -> None:
        if self.server.shut.is_set():
            self.server.turned_away += 1
            return
        with socket.create_connection(("127.0.0.1", self.server.behind)) as behind:
            back = threading.Thread(target=self._carry, args=(behind, self.request), daemon=True)
            back.start()
            self._carry(self.request, behind)
            back.join()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while (data := source.recv(CHUNK)) and not self.server.shut.is_set():
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return


@pytest.fixture
def door(missing: Callable[[str], NoReturn]) -> Iterator[Door]:
    """A store behind a door; the credentials stand in this process's environment too."""
    try:
        planned = S3Server.plan()
    except ImportError:
        missing("moto: no job runs on S3")
    with planned, Door(planned.port) as door:
        os.environ["AWS_ENDPOINT_URL"] = door.url
        yield door
        door.shutdown()


@pytest.fixture
def s3_service(door: Door) -> Iterator[Service]:
    folder = short_folder("s3")
    running = start(folder, {"SHARDYARD_STORE_URL": "s3://checkpoints/jobs", "AWS_ENDPOINT_URL": door.url})
    yield running
    door.shut.clear()
    stop(running)


def files_with_a_secret(folders: list[Path]) -> list[str]:
    """Files below the folders that hold one of the credentials."""
    words = [secret.encode() for secret in SECRETS]
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return [str(path) for path in files if any(word in path.read_bytes() for word in words)]


def test_a_job_on_s3_loses_nothing_while_its_store_is_away(s3_service: Service, door: Door) -> None:
    """The save that meets a shut door is delayed, the steps go on, every checkpoint is there in the end, and a resume
    on another number of ranks goes on from the bucket. No credential is in the database, a log or a file.
    """
    service = s3_service
    gate = Gate(service.folder / "s3.gate")
    job = service.submit(gate.spec("on s3"))
    told = lambda: {item["step"] for item in service.client.items(f"/v1/jobs/{job}/checkpoints", 100)}  # noqa: E731
    wait_for(lambda: CHECKPOINT_EVERY in told(), "a checkpoint before the gate", lambda: service.job(job))

    door.shut.set()
    gate.open()
    beyond = STEPS - CHECKPOINT_EVERY  # due while the store is away: it, or the one before, cannot end
    held_up = lambda: service.job(job)["step"] >= beyond and door.turned_away > 1  # noqa: E731
    wait_for(held_up, "the steps go on", lambda: service.job(job))
    assert max(told()) < beyond, "what is saved while the store is away comes later"
    door.shut.clear()
    whole = service.wait(job)
    assert whole["status"] == "succeeded" and {beyond, STEPS} <= told()
    events = service.client.items(f"/v1/jobs/{job}/events", 500)
    assert not [event for event in events if event["action"].startswith("checkpoint.failed")]

    store = open_store(f"s3://checkpoints/jobs/{job}")
    names = list_checkpoints(store)
    assert names[0].step == STEPS and all(verify(store, name.folder).ok for name in names)
    more = {"train": {"steps": STEPS + 2}, "ranks": 1, "zero": {"stage": 0}}
    service.client.post(f"/v1/jobs/{job}/resume", more)
    again = service.wait(job, lambda now: now["attempt"] == 2 and now["status"] == "succeeded")
    assert again["step"] == STEPS + 2 and list_checkpoints(store)[0].step == STEPS + 2

    newest = max(service.client.items(f"/v1/jobs/{job}/checkpoints", 100), key=lambda item: item["step"])
    verified = service.run("verify", newest["id"], "--json")
    assert verified.returncode == 0 and json.loads(verified.stdout)["bad_ranks"] == [], verified.stderr
    proved = service.run("verify-resume", job, "--json")
    assert proved.returncode == 0, proved.stderr
    found = json.loads(proved.stdout)
    assert (found["verdict"], found["first_step"], found["compared_steps"]) == ("bit-exact", STEPS + 1, 2)

    head = find_head(service.folder)
    assert head is not None
    assert files_with_a_secret([service.folder, Path(head.temp)]) == []
