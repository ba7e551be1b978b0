"""What holds for every page: nothing for axe to say, no sideways scrolling at 400 px, both themes, text as text."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, ViewportSize, expect

from server.cli.client import Json
from tests.browser.conftest import settled
from tests.browser.specs import digits, own_model
from tests.running_service import Service

AXE = "web/node_modules/axe-core/axe.min.js"
VIEWS = ("training", "memory", "checkpoints", "logs", "events", "spec")
WIDE: ViewportSize = {"width": 1280, "height": 860}
NARROW: ViewportSize = {"width": 400, "height": 860}


@pytest.fixture(scope="module")
def paths(service: Service) -> list[str]:
    """Every page, over one finished job, one failed, one that waits for more slots than there are."""
    done = service.submit(digits("all the views, 全部", steps=60))
    failed = service.submit(own_model("shapes that do not fit", service.folder, "wrong:build"))
    waiting = service.submit(
        {
            **digits("more ranks than slots"),
            "train": {"steps": 10, "global_batch": 64, "micro_batch": 1},
            "resources": {"ranks": 64},
        }
    )
    service.wait(done, lambda job: job["status"] == "succeeded")
    service.wait(failed, lambda job: job["status"] == "failed")
    service.wait(waiting, lambda job: job["status"] == "queued" and job["reason"]["code"] == "no_capacity")
    views = [f"/jobs/{done}?view={view}" for view in VIEWS]
    return ["/", *views, f"/jobs/{failed}", f"/jobs/{waiting}", "/new", "/cluster"]


@pytest.mark.parametrize(
    ("theme", "size"),
    [
        pytest.param("light", WIDE, id="light-wide"),
        pytest.param("dark", NARROW, id="dark-narrow"),
        pytest.param("light", NARROW, id="light-narrow", marks=pytest.mark.soak),
        pytest.param("dark", WIDE, id="dark-wide", marks=pytest.mark.soak),
    ],
)
def test_axe_finds_nothing(page: Page, paths: list[str], root: Path, theme: str, size: ViewportSize) -> None:
    """No violation of any weight on any page, in both themes, wide and at 400 px."""
    page.set_viewport_size(size)
    page.emulate_media(color_scheme="dark" if theme == "dark" else "light", reduced_motion="reduce")
    rules = (root / AXE).read_text()
    found = []
    for path in paths:
        settled(page, path)
        page.evaluate(rules)
        result: Json = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        found += [(path, each["id"], each["nodes"][0]["target"]) for each in result["violations"]]
    assert found == []


def test_axe_finds_nothing_in_a_question(page: Page, paths: list[str], root: Path) -> None:
    """The dialogs that ask before something is done; Escape closes them and the focus returns to the button."""
    rules = (root / AXE).read_text()
    settled(page, paths[1])
    for button in ("Resume…", "Delete…"):
        page.get_by_role("button", name=button).click()
        expect(page.get_by_role("dialog")).to_be_visible()
        page.evaluate(rules)
        assert page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"] == []
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        expect(page.get_by_role("button", name=button)).to_be_focused()


def test_every_page_fits_400_pixels(page: Page, paths: list[str]) -> None:
    """Nothing reaches past the right edge; wide tables scroll inside their own box."""
    page.set_viewport_size(NARROW)
    for path in paths:
        settled(page, path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, path


def test_the_theme_follows_the_system_until_somebody_chooses(page: Page) -> None:
    """The choice is kept over a reload; without one the system's change is followed at once."""
    document = page.locator("html")
    page.emulate_media(color_scheme="dark")
    expect(document).to_have_attribute("data-theme", "dark")
    page.emulate_media(color_scheme="light")
    expect(document).to_have_attribute("data-theme", "light")
    page.get_by_role("button", name="Use the dark theme").click()
    page.reload()
    expect(document).to_have_attribute("data-theme", "dark")


def test_every_control_of_a_job_is_reached_by_the_keyboard(page: Page, paths: list[str]) -> None:
    """Tab alone reaches the actions, the views and each chart; the focus is visible wherever it is."""
    settled(page, paths[1])
    page.locator(".u-over").first.wait_for()
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent + (document.activeElement.ariaLabel ?? '')"))
    text = "\n".join(reached)
    for control in ("Skip to the page", "Resume…", "Copy spec", "Logs", "Loss, steps", "Gradient norm, steps"):
        assert control in text, control


def test_names_and_output_are_text_in_any_script(page: Page, service: Service) -> None:
    """Markup in a job's name or output is shown as it was written and never run."""
    name = "<img src=x onerror=\"document.title='hacked'\"> 训练 تدريب"
    job_id = service.submit(own_model(name, service.folder, "odd:build"))
    service.wait(job_id, lambda job: job["status"] == "succeeded")
    page.goto(f"/jobs/{job_id}?view=logs")
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    expect(page.locator(".log")).to_contain_text("<b id=hacked>训练 & تدريب</b> red")
    assert page.locator("#hacked").count() == 0
    page.goto("/")
    expect(page.get_by_role("link", name=name)).to_be_visible()
    assert "hacked" not in page.title()
