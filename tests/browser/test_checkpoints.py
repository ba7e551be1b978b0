"""Checkpoints on the page: a long list, what a fork would read, the fork, its family, the store's orphans."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page, expect

from tests.browser.specs import digits
from tests.running_service import Service

STEPS, KEPT, PAGE = 30, 27, 25  # of a job that saves after each step; rows of a page


def test_a_fork_from_the_page_shows_its_preflight_and_joins_the_family(
    quiet_page: Page, quiet_service: Service
) -> None:
    """From one of many checkpoints, its shards read when asked for, to a new job that begins there; both pages show
    the same family, also as a table.
    """
    many = {**digits("the parent, 親", steps=STEPS), "checkpoint": {"every": 1, "keep_latest": KEPT}}
    job = quiet_service.submit(many)
    quiet_service.wait(job, lambda seen: seen["status"] == "succeeded")
    page = quiet_page
    page.goto(f"/jobs/{job}?view=checkpoints")
    read_the_long_list(page)
    page.get_by_text("2 shards").first.click()
    expect(page.get_by_role("region", name="Shards").get_by_role("row")).to_have_count(3)
    page.get_by_role("button", name=f"Fork at step {STEPS}").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_text(f"Begins at step {STEPS}")).to_be_visible()
    expect(dialog.get_by_text("Each rank reads")).to_be_visible()
    dialog.get_by_label("Name").fill("the child, 子")
    dialog.get_by_label("Steps in all").fill(str(STEPS))
    assert dialog.get_by_label("Steps in all").evaluate("input => !input.validity.valid")
    dialog.get_by_label("Steps in all").fill(str(2 * STEPS))
    dialog.get_by_role("button", name="Fork job").click()
    expect(page.get_by_role("heading", name="the child, 子")).to_be_visible()
    page.goto(f"{page.url.split('?')[0]}?view=checkpoints")
    expect(page.get_by_role("img", name="attempts of a family")).to_be_visible()
    page.get_by_text("As a table").click()
    table = page.get_by_role("region", name="Lineage as a table")
    expect(table.get_by_text(f"forked at step {STEPS} of attempt 1 of “the parent, 親”")).to_be_visible()
    table.get_by_role("link", name="the parent, 親").click()
    expect(page.get_by_role("heading", name="the parent, 親")).to_be_visible()


def read_the_long_list(page: Page) -> None:
    """A page of it at first, the older ones and the removed ones when asked for."""
    rows, taken = page.locator(".checkpoint"), page.get_by_label(f"{STEPS - KEPT} removed")
    expect(page.get_by_text(f"{KEPT} kept")).to_be_visible()
    expect(rows).to_have_count(PAGE)
    page.get_by_role("button", name="Older checkpoints").click()
    expect(rows).to_have_count(KEPT)
    taken.check()
    page.get_by_role("button", name="Older checkpoints").click()
    expect(rows).to_have_count(STEPS)
    expect(rows.filter(has_text="deleted")).to_have_count(STEPS - KEPT)
    taken.uncheck()
    expect(rows).to_have_count(KEPT)


def test_what_nothing_refers_to_is_listed_when_asked_for(quiet_page: Page, quiet_service: Service) -> None:
    """The cluster page looks through the store; what it finds stays where it is."""
    stray = Path(quiet_service.folder, "checkpoints", "somebody-else", "file")
    stray.parent.mkdir(parents=True, exist_ok=True)
    stray.write_bytes(b"x")
    quiet_page.goto("/cluster")
    quiet_page.get_by_role("button", name="Look for orphans").click()
    row = quiet_page.get_by_role("region", name="Orphans").get_by_role("row").filter(has_text="somebody-else")
    expect(row).to_contain_text("The database has no such job")
    assert stray.exists()
