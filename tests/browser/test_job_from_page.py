"""The promise, from the page: submit, watch, cancel, resume elsewhere, the same bits."""

from __future__ import annotations

import json
from dataclasses import asdict

from playwright.sync_api import Page, expect

from server.cli.client import Json
from tests.browser.specs import as_yaml, digits, own_model
from tests.gated import STEPS, Gate, told_to_stop
from tests.running_service import Service
from tests.waiting import PATIENCE_SECONDS, wait_for
from workers.calibrations import calibration_file, this_machine
from workers.step_time import Calibration

AT_REST_MS = PATIENCE_SECONDS * 1000


def write_spec(page: Page, spec: Json) -> None:
    """Replace the editor's text by a spec, as a person pastes it."""
    editor = page.locator(".cm-content")
    editor.click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(as_yaml(spec))


def test_a_job_cancelled_and_resumed_from_the_page_ends_with_the_bits_of_an_undisturbed_run(
    page: Page, service: Service
) -> None:
    """2 ranks at stage 2, cancelled midway, resumed on 1 rank at stage 3: the digest equals the uninterrupted run's."""
    whole, gate = (Gate(service.folder / f"{name}.gate") for name in ("undisturbed", "from-the-page"))
    undisturbed = service.submit(whole.spec("undisturbed"))
    whole.open()
    page.get_by_role("link", name="New job").click()
    write_spec(page, gate.spec("from-the-page"))
    expect(page.locator(".stage-plan")).to_have_count(4, timeout=AT_REST_MS)
    expect(page.locator(".stage-plan[aria-current]")).to_contain_text("Stage 2")
    gate.allow(STEPS // 4)
    expected = service.wait(undisturbed, lambda job: job["status"] == "succeeded")["digest"]

    page.get_by_role("button", name="Submit job").click()
    page.wait_for_url("**/jobs/*")
    job_id = page.url.rpartition("/")[2]
    loss = page.get_by_test_id("loss")
    expect(loss).not_to_have_text("–", timeout=AT_REST_MS)
    seen = loss.inner_text()
    gate.allow(STEPS // 2)
    expect(loss).not_to_have_text(seen)

    page.get_by_role("button", name="Cancel…").click()
    expect(page.get_by_role("dialog")).to_contain_text("Cancel “from-the-page”?")
    page.get_by_role("button", name="Cancel job").click()
    attempt = service.job(job_id)["current_attempt"]["id"]
    wait_for(lambda: told_to_stop(service.folder, attempt), "the ranks were told", service.log_tail)
    gate.open()
    state = page.locator(".job-state .state")
    expect(state).to_have_text("cancelled", timeout=AT_REST_MS)
    stopped_at = service.job(job_id)["step"]
    assert 0 < stopped_at < STEPS

    page.get_by_role("button", name="Resume…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Ranks", exact=True).fill("1")
    dialog.get_by_label("Stage", exact=True).select_option("3")
    dialog.get_by_role("button", name="Resume job").click()
    expect(state).to_have_text("succeeded", timeout=AT_REST_MS)
    expect(page.get_by_test_id("digest")).to_have_text(expected)
    assert service.job(job_id)["stage"] == 3


def test_a_users_own_model_is_planned_before_it_is_submitted(page: Page, service: Service) -> None:
    """The server imports it in a process of its own; the page waits for the answer and shows all four stages, and a
    step's seconds where the machine was calibrated, with the day, or how to get them.
    """
    page.goto("/new")
    write_spec(page, digits("ours"))
    expect(page.locator(".step-basis")).to_contain_text("`shardyard calibrate", timeout=AT_REST_MS)
    here = this_machine("cpu")
    kept = calibration_file(service.folder, here)
    kept.parent.mkdir(exist_ok=True)
    rates = {name: 1e5 for name, field in Calibration.model_fields.items() if field.annotation is float}
    kept.write_text(json.dumps({**asdict(here), **rates, "day": "2026-11-30"}))
    write_spec(page, own_model("mine", service.folder, "odd:build"))
    expect(page.locator(".step-basis")).to_contain_text("Calibrated on 2026-11-30", timeout=AT_REST_MS)
    expect(page.locator(".stage-plan", has_text="s a step")).to_have_count(4)
    kept.unlink()
    write_spec(page, own_model("mine", service.folder, "odd:no_such_function"))
    expect(page.get_by_role("alert")).to_contain_text("no_such_function", timeout=AT_REST_MS)


def test_a_mistake_is_shown_at_its_line_before_anything_is_submitted(page: Page) -> None:
    """The server reads the text as it is typed; the editor marks the line and the sentence says what to write."""
    page.goto("/new")
    write_spec(page, {**digits("typo"), "resorces": {"ranks": 2}})
    problems = page.get_by_role("alert")
    expect(problems).to_contain_text("resources")
    line = as_yaml({**digits("typo"), "resorces": {"ranks": 2}}).splitlines().index("resorces:") + 1
    problems.get_by_role("button", name=f"line {line}").click()
    expect(page.locator(".cm-activeLine")).to_contain_text("resorces")
    expect(page.locator(".cm-lint-marker-error")).to_have_count(1)
