"""A real service, a real Ray, and Chromium: what the browser tests drive."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize, expect, sync_playwright

from tests.running_service import Service, start, stop

PAGE_MS = 120_000
expect.set_options(timeout=PAGE_MS)
SIZE: ViewportSize = {"width": 1280, "height": 860}


@pytest.fixture(scope="module")
def quiet_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with simulated ranks, empty at first: for what the page does, not what a job does."""
    running = start(tmp_path_factory.mktemp("quiet"), {"SHARDYARD_FAKE_CLUSTER": "true"})
    yield running
    stop(running)


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


@contextmanager
def logged_in(browser: Browser, service: Service) -> Iterator[Page]:
    """A logged-in page; at its end no script may have failed and nobody but its server was asked."""
    watch = Watch()
    with browser.new_context(base_url=service.url, viewport=SIZE) as context:
        yield open_page(context, service, watch)
    assert watch.complaints == []
    assert [url for url in watch.strangers if not url.startswith(("data:", "blob:"))] == []


@pytest.fixture
def page(browser: Browser, service: Service) -> Iterator[Page]:
    """A page of the real service."""
    with logged_in(browser, service) as opened:
        yield opened


@pytest.fixture
def quiet_page(browser: Browser, quiet_service: Service) -> Iterator[Page]:
    """A page of the service with simulated ranks."""
    with logged_in(browser, quiet_service) as opened:
        yield opened
