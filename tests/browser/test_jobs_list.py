"""The list: empty, filtered, searched, sorted, many at once. Ranks are simulated here: the page is the subject."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from tests.browser.specs import digits
from tests.running_service import Service


def test_an_empty_list_shows_the_first_command(quiet_page: Page) -> None:
    """A new user sees what to type, not an empty table. (First in this file: nothing was submitted yet.)"""
    expect(quiet_page.get_by_role("heading", name="No jobs yet")).to_be_visible()
    expect(quiet_page.locator(".command code").first).to_contain_text("shardyard submit")
    expect(quiet_page.get_by_role("link", name="Write a job spec")).to_be_visible()


def test_filter_search_and_columns_live_in_the_address(quiet_page: Page, quiet_service: Service) -> None:
    """Going to a job and back shows the same rows, the same order and the same columns."""
    for name in ("alpha one", "alpha two", "beta"):
        quiet_service.submit(digits(name, steps=100_000))
    page = quiet_page
    rows = page.locator(".jobs-row")
    expect(rows).to_have_count(3)
    page.keyboard.press("/")
    page.keyboard.type("ALPHA")
    expect(rows).to_have_count(2)
    page.get_by_role("button", name=re.compile("^Name")).click()
    expect(page.get_by_role("columnheader", name="Name")).to_have_attribute("aria-sort", re.compile("cending$"))
    page.locator(".column-picker summary").click()
    page.get_by_role("checkbox", name="Curve").uncheck()
    expect(page.get_by_role("columnheader", name="Curve")).to_have_count(0)
    order = page.locator(".job-name").all_inner_texts()
    page.get_by_role("link", name="alpha one").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("alpha one")
    page.go_back()
    expect(rows).to_have_count(2)
    assert page.locator(".job-name").all_inner_texts() == order
    expect(page.get_by_role("columnheader", name="Curve")).to_have_count(0)


def test_cancelling_many_asks_once_naming_each_and_reports_each(quiet_page: Page, quiet_service: Service) -> None:
    """Two selected jobs, one question with both names, both end as cancelled."""
    ids = [quiet_service.submit(digits(name, steps=100_000)) for name in ("one of two", "two of two")]
    page = quiet_page
    for name in ("one of two", "two of two"):
        page.get_by_label(f"Select {name}").check()
    page.get_by_role("button", name="Cancel selected…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("listitem")).to_have_count(2)
    expect(dialog).to_contain_text("one of two")
    dialog.get_by_role("button", name="Cancel 2 jobs").click()
    expect(page.get_by_text("2 of 2 jobs are being cancelled.")).to_be_visible()
    cancelled = page.locator(".jobs-row", has_text="of two").locator(".state[data-status=cancelled]")
    expect(cancelled).to_have_count(2)
    assert all(quiet_service.job(job_id)["status"] == "cancelled" for job_id in ids)


def test_a_browser_without_the_cookie_is_asked_who_it_is(quiet_page: Page, quiet_service: Service) -> None:
    """No cookie: the token is asked for; a wrong one is refused in words; the right one opens the page."""
    page = quiet_page
    page.context.clear_cookies()
    page.goto(f"{quiet_service.url}/cluster")
    page.get_by_label("Token", exact=True).fill("not the token")
    page.get_by_role("button", name="Enter").click()
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_label("Token", exact=True).fill(quiet_service.client.address.token)
    page.get_by_role("button", name="Enter").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Cluster")
