"""A page that stays open: the server dies and comes back, the list is longer than the screen. Ranks are simulated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import Watch, open_page
from tests.browser.specs import digits
from tests.ports import quiet_port
from tests.running_service import Service, start, stop
from tests.waiting import wait_for

FAKE = {"SHARDYARD_FAKE_CLUSTER": "true", "SHARDYARD_LOST_SECONDS": "1", "SHARDYARD_SHUTDOWN_SECONDS": "1"}
MANY = 80  # more than a page of the list
DRAWN = 60  # at most: what fits a screen, and a margin


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[list[Service]]:
    """A service to be killed and started again on its port; the last of the list is the living one."""
    lives = [start(tmp_path, {**FAKE, "SHARDYARD_PORT": str(quiet_port())})]
    yield lives
    stop(lives[-1])


def test_a_page_outlives_its_server(browser: Browser, mortal: list[Service]) -> None:
    """kill -9 of the server: the page keeps its rows and says that it reconnects; restarted, it is live again."""
    first = mortal[0]
    first.submit(digits("before", steps=100_000))
    with browser.new_context(base_url=first.url) as context:
        page = open_page(context, first, Watch())
        link, rows = page.locator(".link-state"), page.locator(".jobs-row")
        expect(link).to_have_attribute("data-state", "live")
        expect(rows).to_have_count(1)
        first.process.kill()
        first.process.wait()
        expect(link).to_have_attribute("data-state", "lost")
        expect(rows).to_have_count(1)
        mortal.append(start(first.folder, {**FAKE, "SHARDYARD_PORT": str(urlsplit(first.url).port)}))
        expect(link).to_have_attribute("data-state", "live")
        mortal[-1].submit(digits("after", steps=100_000))
        expect(rows).to_have_count(2)
        expect(page.get_by_role("link", name="after")).to_be_visible()


def test_a_long_list_is_read_in_pages_and_drawn_in_part(quiet_page: Page, quiet_service: Service) -> None:
    """Of 80 jobs only those in sight are in the document; scrolling reads on to the oldest."""
    for number in range(MANY):
        quiet_service.submit(digits(f"job {number:03d}", steps=100_000))
    page = quiet_page
    rows = page.locator(".jobs-row")
    expect(page.get_by_role("link", name=f"job {MANY - 1:03d}")).to_be_visible()
    assert rows.count() < DRAWN
    oldest = page.get_by_role("link", name="job 000")

    def reached() -> bool:
        page.mouse.wheel(0, 1500)
        return oldest.count() > 0

    wait_for(reached, "the oldest job is drawn", page.locator(".jobs-row").all_inner_texts)
    expect(oldest).to_be_visible()
    assert rows.count() < DRAWN
