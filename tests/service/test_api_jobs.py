"""Jobs over REST: submit, list, read, change, act; on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.service.conftest import SPEC, Api


async def test_a_submitted_job_is_queued_and_read_back_the_same(api: Api) -> None:
    """POST answers 201 with a Location; GET answers the same body and the version as ETag."""
    answer = await api.admin.post("/v1/jobs", json=SPEC)
    assert answer.status_code == 201
    job = answer.json()
    assert (job["status"], job["desired"], job["reason"]["code"]) == ("queued", "run", "submitted")
    again = await api.admin.get(answer.headers["location"])
    assert again.json() == job
    assert again.headers["etag"] == '"1"'


async def test_yaml_and_json_make_the_same_spec(api: Api) -> None:
    """The two content types differ in the text kept, in nothing else."""
    text = "name: digits\nmodel: {kind: mlp}\ndata: {kind: digits}\ntrain: {steps: 100}\n"
    as_yaml = await api.admin.post("/v1/jobs", content=text, headers={"Content-Type": "application/yaml"})
    assert as_yaml.status_code == 201, as_yaml.text
    assert as_yaml.json()["spec_yaml"] == text
    assert as_yaml.json()["spec"] == (await api.submit())["spec"]
