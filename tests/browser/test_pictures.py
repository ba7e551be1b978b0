"""The pictures of the docs: each page in both themes, over jobs that ran. PICTURES=1 writes them to docs/images.

Among the soaks: that the pages draw themselves in both themes is seen by test_pages.py too.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import settled
from tests.browser.specs import digits, own_model
from tests.running_service import Service

pytestmark = [pytest.mark.timeout(900), pytest.mark.soak]
WRITES = os.environ.get("PICTURES") == "1"
STEPS = 240 if WRITES else 40  # pictures are of a run on the standard library; the check alone is quicker


@pytest.fixture(scope="module")
def job_id(service: Service) -> str:
    """A GPT in mid-training, among jobs that succeeded, were cancelled, failed, or wait."""
    names = ("baseline", "shard the optimizer", "切分梯度", "shard everything")
    for stage, name in enumerate(names if WRITES else names[:1]):
        done = service.submit(digits(f"{name}, stage {stage}", steps=60, stage=stage))
        service.wait(done, lambda job: job["status"] == "succeeded")
    stopped = service.submit({**digits("wide-mlp", steps=20_000, hidden=256), "tags": ["sweep"]})
    service.wait(stopped, lambda job: job["step"] > 120)
    service.client.post(f"/v1/jobs/{stopped}/cancel")
    service.wait(stopped, lambda job: job["status"] == "cancelled")
    failed = service.submit(own_model("my-own-model", service.folder, "wrong:build"))
    service.wait(failed, lambda job: job["status"] == "failed")
    train = {"steps": 500, "global_batch": 64, "micro_batch": 1}
    service.submit({**digits("tonight on 16 ranks"), "train": train, "resources": {"ranks": 16}})
    text = service.folder / "text.txt"
    text.write_text("\n".join(Path(__file__).read_text() for _ in range(20)))
    gpt = service.submit(
        {
            "name": "gpt-on-stdlib",
            "tags": ["demo"],
            "model": {"kind": "gpt", "layers": 4, "hidden": 128, "heads": 4, "context": 64},
            "data": {
                "kind": "text",
                "path": "stdlib" if WRITES else str(text),
                "tokenizer": {"kind": "bpe", "vocab": 1024 if WRITES else 300},
            },
            "train": {"steps": STEPS, "global_batch": 16, "micro_batch": 4, "eval": {"every": 40}},
            "zero": {"stage": 2},
            "checkpoint": {"every": 40, "keep_latest": 3},
        }
    )
    service.wait(gpt, lambda job: job["step"] > STEPS // 2)
    return gpt


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_each_page_is_pictured(page: Page, job_id: str, root: Path, tmp_path: Path, theme: str) -> None:
    """Every page draws itself in both themes; a picture of one colour would be no page."""
    page.emulate_media(color_scheme="dark" if theme == "dark" else "light", reduced_motion="reduce")
    folder = root / "docs" / "images" if WRITES else tmp_path
    paths = {
        "jobs": "/",
        "job": f"/jobs/{job_id}",
        "memory": f"/jobs/{job_id}?view=memory",
        "checkpoints": f"/jobs/{job_id}?view=checkpoints",
        "logs": f"/jobs/{job_id}?view=logs",
        "events": f"/jobs/{job_id}?view=events",
        "new": "/new",
        "cluster": "/cluster",
    }
    for name, path in paths.items():
        settled(page, path)
        if name == "new":
            page.locator(".stage-plan").nth(3).wait_for()
        if name == "job":
            expect(page.locator(".u-over")).to_have_count(4)
        picture = page.screenshot(path=folder / f"{name}-{theme}.png", animations="disabled")
        assert len(picture) > 10_000, name
