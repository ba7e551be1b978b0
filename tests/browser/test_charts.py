"""Curves: nothing bad hidden, the zoom kept, readable without the picture; and the save that runs beside them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.specs import digits, own_model
from tests.running_service import Service
from workers.process_table import PROC

NON_FINITE = 5  # steps of specs.ODD whose loss is NaN


@pytest.fixture(scope="module")
def odd_job(service: Service) -> str:
    """A finished job whose loss was NaN at five steps."""
    job_id = service.submit(own_model("odd loss", service.folder, "odd:build"))
    service.wait(job_id, lambda job: job["status"] == "succeeded")
    return job_id


def chart(page: Page, title: str) -> Locator:
    """The chart of that title, drawn."""
    found = page.get_by_test_id(f"chart-{title}")
    found.locator(".u-over").wait_for()
    return found


def drag(page: Page, box: Locator, start: float, end: float) -> None:
    """Drag over a part of a chart's width."""
    area = box.locator(".u-over").bounding_box()
    assert area is not None
    y = area["y"] + area["height"] / 2
    page.mouse.move(area["x"] + area["width"] * start, y)
    page.mouse.down()
    page.mouse.move(area["x"] + area["width"] * (start + end) / 2, y, steps=4)
    page.mouse.move(area["x"] + area["width"] * end, y, steps=4)
    page.mouse.up()


def edge_step(page: Page, stage: Locator, key: str) -> str:
    """The step that a chart announces at the edge of what it shows."""
    stage.focus()
    page.keyboard.press(key)
    spoken = stage.get_by_role("status")
    expect(spoken).to_contain_text("step ")
    return spoken.inner_text().partition(":")[0]


def test_non_finite_losses_are_counted_and_named_never_bridged(page: Page, odd_job: str) -> None:
    """The badge has the count; the table names NaN at its steps and keeps the values around them."""
    page.goto(f"/jobs/{odd_job}")
    loss = chart(page, "Loss")
    expect(loss.locator(".badge")).to_have_text(f"{NON_FINITE} non-finite")
    loss.get_by_role("button", name="table").click()
    rows = loss.get_by_role("row")
    for step in (21, 24, 31):
        expect(rows.filter(has=page.get_by_role("rowheader", name=str(step), exact=True))).to_contain_text("NaN")
    expect(rows.filter(has=page.get_by_role("rowheader", name="25", exact=True))).not_to_contain_text("NaN")


def test_a_chart_speaks_and_zooms_by_keyboard(page: Page, odd_job: str) -> None:
    """Arrows announce step and value, plus zooms around the cursor, Escape shows everything again."""
    page.goto(f"/jobs/{odd_job}")
    stage = chart(page, "Loss").get_by_role("group")
    stage.focus()
    page.keyboard.press("Home")
    for _ in range(21):
        page.keyboard.press("ArrowRight")
    expect(stage.get_by_role("status")).to_contain_text("step 21: train NaN")
    page.keyboard.press("+")
    follow = page.get_by_role("button", name="Show all")
    expect(follow).to_be_visible()
    page.keyboard.press("Escape")
    expect(follow).to_have_count(0)


def test_a_live_job_keeps_the_zoom_and_shows_the_save_that_runs(page: Page, service: Service) -> None:
    """Drag over a live chart: its steps stay those while the job takes ten more; Follow shows the newest again.

    While a save runs the page names its step; of one that has ended it says where the time went.
    """
    with service.running(digits("zoomed", steps=100_000)) as job_id:
        service.wait(job_id, lambda job: job["step"] >= 40)
        keep_the_zoom(page, service, job_id)
        see_a_save(page, service, job_id)
        page.get_by_role("button", name="Kill…").click()
        page.get_by_role("button", name="Kill job").click()
        expect(page.locator(".job-state .state")).to_have_text("cancelled")


def see_a_save(page: Page, service: Service, job_id: str) -> None:
    """The writer of a rank stands still, so its next save does not end; then it goes on."""
    page.get_by_role("link", name="Checkpoints", exact=True).click()
    expect(page.get_by_label("Parts of the save").first).to_contain_text("hashed and written")
    rank = service.job(job_id)["current_attempt"]["rank_states"][0]["pid"]
    writer = next(process for process in PROC.glob("[0-9]*") if is_writer_of(rank, process))
    os.kill(int(writer.name), signal.SIGSTOP)
    saving = page.get_by_label("Saving beside training, this attempt").get_by_text("Saving now")
    expect(saving).to_be_visible()
    os.kill(int(writer.name), signal.SIGCONT)


def is_writer_of(rank: int, process: Path) -> bool:
    try:
        words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:  # it has ended meanwhile
        return False
    return b"zero_engine.writer" in words and words[-1] == str(rank).encode()


def keep_the_zoom(page: Page, service: Service, job_id: str) -> None:
    page.goto(f"/jobs/{job_id}")
    loss = chart(page, "Loss")
    with page.expect_response(lambda answer: "to_step=" in answer.url):  # until then it shows the curve of before
        drag(page, loss, 0.2, 0.6)
    follow = page.get_by_role("button", name="Follow")
    expect(follow).to_be_visible()
    zoomed = follow.inner_text()
    label = loss.get_by_role("group")
    before = label.get_attribute("aria-label")
    edges = [edge_step(page, label, key) for key in ("Home", "End")]
    step = service.job(job_id)["step"]
    service.wait(job_id, lambda job: job["step"] >= step + 10)
    assert [edge_step(page, label, key) for key in ("Home", "End")] == edges
    assert follow.inner_text() == zoomed
    follow.click()
    expect(follow).to_have_count(0)
    expect(label).not_to_have_attribute("aria-label", before or "")


def test_memory_shows_the_plan_met_to_the_byte_and_the_papers_lines(page: Page, service: Service) -> None:
    """Every planned band equals its plan; the lines of all four stages of the paper are drawn beside it."""
    job_id = service.submit(digits("measured"))
    service.wait(job_id, lambda job: job["status"] == "succeeded")
    page.goto(f"/jobs/{job_id}?view=memory")
    table = page.locator(".category-table")
    expect(table.get_by_role("row", name="moments")).to_contain_text("=")
    for stage in range(4):
        expect(page.locator(".bands-level", has_text=f"paper, stage {stage}")).to_have_count(1)
    expect(page.locator(".traffic")).to_be_visible()
    expect(page.get_by_text("equals the plan to the byte")).to_be_visible()
