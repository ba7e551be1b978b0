"""The plan of a job before anything runs: whole, or why a user's model has none."""

from __future__ import annotations

import json

from playwright.sync_api import Page, expect

from tests.browser.conftest import settled
from tests.browser.specs import own_model
from tests.running_service import Service

MORE_THAN_THERE_ARE = {
    "train": {"steps": 10, "global_batch": 64, "micro_batch": 1},
    "zero": {"stage": 3},
    "resources": {"ranks": 64},
}


def test_a_waiting_job_of_a_users_model_shows_its_plan_or_why_there_is_none(
    quiet_page: Page, quiet_service: Service
) -> None:
    """Every stage, with the one that the spec names marked; the page is told when the plan is made."""
    page, folder = quiet_page, quiet_service.folder
    good, bad = (
        quiet_service.submit({**own_model(entry, folder, entry), **MORE_THAN_THERE_ARE})
        for entry in ("odd:build", "wrong:missing")
    )
    settled(page, f"/jobs/{good}?view=memory")
    expect(page.get_by_role("heading", name="Plan", exact=True)).to_be_visible()
    expect(page.locator(".stage-plan")).to_have_count(4)
    expect(page.locator(".stage-plan[aria-current=true]")).to_contain_text("Stage 3")
    settled(page, f"/jobs/{bad}?view=memory")
    expect(page.get_by_role("alert")).to_contain_text("No plan can be made of this model")
    expect(page.get_by_role("alert")).to_contain_text("module wrong has no function missing")
    shown = json.loads(quiet_service.run("show", bad).stdout)["plan"]
    assert (shown["status"], shown["failure"]) == (
        "failed",
        "model.entry wrong:missing: module wrong has no function missing",
    )
