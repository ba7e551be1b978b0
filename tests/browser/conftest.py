"""A real service, a real Ray, and Chromium: what the browser tests drive."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize, expect, sync_playwright

from server.cli.client import Client, Json, find_server
from server.cli.errors import CommandError
from server.cli.follow import is_at_rest

SHARDYARD = str(Path(sys.executable).with_name("shardyard"))
START_SECONDS = 120.0
STOP_SECONDS = 60.0
PAGE_MS = 15_000
SIZE: ViewportSize = {"width": 1280, "height": 860}


@dataclass
class Service:
    """A running `shardyard serve` and a way to ask it things without the page."""

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

    def submit(self, spec: Json) -> str:
        """Submit a spec past the page; the job's id."""
        return str(self.client.post("/v1/jobs", spec)["id"])

    def job(self, job_id: str) -> Json:
        """The job now."""
        view: Json = self.client.get(f"/v1/jobs/{job_id}")
        return view

    def wait(self, job_id: str, done: Callable[[Json], bool] = is_at_rest) -> Json:
        """The job once `done` holds; a job that comes to rest without it fails the test with its reason."""
        for _ in self.client.changes(job_id, at_least_every_seconds=1.0):
            job = self.job(job_id)
            if done(job):
                return job
            if is_at_rest(job):
                pytest.fail(f"the job {job['status']}: {job['reason']}\n{job.get('error')}")
        raise AssertionError("changes() never ends")


def start_service(folder: Path, environment: dict[str, str]) -> Service:
    """Start `shardyard serve` in and on a folder; returns when it is ready."""
    output = (folder / "serve.out").open("ab")
    process = subprocess.Popen(
        [SHARDYARD, "serve", "--data-dir", str(folder)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    output.close()
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            client = ready_client(folder)
            if client is not None:
                return Service(folder, process, client)
        else:
            break
    process.kill()
    pytest.fail(f"serve was not ready: {(folder / 'serve.out').read_text(errors='replace')[-3000:]}")


def ready_client(folder: Path) -> Client | None:
    """A client of the server on this folder, once it says that it is ready."""
    try:
        client = Client(find_server(None, None, folder))
    except CommandError:  # no port is written yet
        return None
    try:
        client.get("/readyz")
    except CommandError:
        client.close()
        return None
    return client


def stop_service(service: Service) -> None:
    """Ctrl-C, then whatever is left of it."""
    service.client.close()
    try:
        service.process.send_signal(signal.SIGINT)
        service.process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        service.process.kill()
    finally:
        command = [SHARDYARD, "stop", "--data-dir", str(service.folder)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service with a Ray head of its own."""
    running = start_service(tmp_path_factory.mktemp("browser"), {})
    yield running
    stop_service(running)


@pytest.fixture(scope="module")
def quiet_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with simulated ranks, empty at first: for what the page does, not what a job does."""
    running = start_service(tmp_path_factory.mktemp("quiet"), {"SHARDYARD_FAKE_CLUSTER": "true"})
    yield running
    stop_service(running)


@pytest.fixture(scope="session")
def browser(missing: Callable[[str], NoReturn]) -> Iterator[Browser]:
    """Debian's Chromium, driven by playwright."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        missing("chromium (apt-get install chromium)")
    with sync_playwright() as playwright:
        # Chromium refuses its sandbox to root, which is who runs in a container.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        running = playwright.chromium.launch(executable_path=path, args=flags)
        yield running
        running.close()


@dataclass
class Watch:
    """What a page complained about and whom it asked."""

    complaints: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    def over(self, page: Page, origin: str) -> None:
        """Watch a page: errors of its scripts and console, and requests to anybody but its server."""
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self.hear(message.type, message.text))
        page.on("request", lambda request: request.url.startswith(origin) or self.strangers.append(request.url))

    def hear(self, kind: str, text: str) -> None:
        """Keep what a script complained about. A refusal of the server is an answer, not a fault."""
        if kind == "error" and not text.startswith("Failed to load resource"):
            self.complaints.append(text)


def open_page(context: BrowserContext, service: Service, watch: Watch) -> Page:
    """A page that is logged in by the link."""
    page = context.new_page()
    page.set_default_timeout(PAGE_MS)
    watch.over(page, service.url)
    page.goto(service.login_link)
    page.get_by_role("heading", level=1).wait_for()
    return page


def settled(page: Page, path: str) -> None:
    """Open a page and wait until its skeletons are gone."""
    page.goto(path)
    page.get_by_role("heading", level=1).wait_for()
    expect(page.locator(".bone")).to_have_count(0)


@pytest.fixture
def page(browser: Browser, service: Service) -> Iterator[Page]:
    """A logged-in page of the real service; at its end no script may have failed and nobody else was asked."""
    watch = Watch()
    with browser.new_context(base_url=service.url, viewport=SIZE) as context:
        yield open_page(context, service, watch)
    assert watch.complaints == []
    assert [url for url in watch.strangers if not url.startswith(("data:", "blob:"))] == []


@pytest.fixture
def quiet_page(browser: Browser, quiet_service: Service) -> Iterator[Page]:
    """The same for the service with simulated ranks."""
    watch = Watch()
    with browser.new_context(base_url=quiet_service.url, viewport=SIZE) as context:
        yield open_page(context, quiet_service, watch)
    assert watch.complaints == []
