"""Output: live, of one rank or all by time, searched on the server."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.browser.specs import own_model
from tests.running_service import Service


def test_output_arrives_while_the_page_is_open_and_is_narrowed_by_rank_and_text(page: Page, service: Service) -> None:
    """New lines appear without a reload; a rank alone shows no other's lines; a search shows matches only."""
    with service.running(own_model("talkative", service.folder, "odd:build", steps=100_000)) as job_id:
        service.wait(job_id, lambda job: job["step"] >= 1)
        page.goto(f"/jobs/{job_id}?view=logs")
        log = page.locator(".log")
        expect(log).to_contain_text("call 80")
        lines = log.get_attribute("aria-label")
        expect(log).not_to_have_attribute("aria-label", lines or "")
    expect(page.locator(".job-state .state")).to_have_text("cancelled")

    assert set(page.locator(".log-rank").all_inner_texts()) <= {"0", "1"}
    page.get_by_label("Search the output").fill("训练")
    expect(page.locator(".log-line")).to_have_count(2)
    page.get_by_label("Rank").select_option("1")
    expect(page.locator(".log-line")).to_have_count(1)
    page.get_by_label("Search the output").fill("there is no such line")
    expect(page.get_by_text("Nothing in the output matches")).to_be_visible()
