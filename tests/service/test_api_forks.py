"""Forks, clones with changes, lineage and the preflight of a resume, over the API."""

from __future__ import annotations

from typing import Any

from server.rows import checkpoints, jobs
from server.rows.readings import GONE
from server.states import Status
from tests.service.conftest import Api
from tests.service.reports_by_hand import Rank, checkpoint, start_attempt
from tests.unit.checkpoint_by_hand import ByHand
from workers.planner import parameters_of
from workers.spec import JobSpec
from zero_engine.layout import Layout
from zero_engine.store import LocalStore


async def _saved(api: Api, *steps: int, name: str = "parent") -> tuple[dict[str, Any], Rank]:
    """A running job with checkpoints that have rows and no files."""
    job = await api.submit(name)
    rank = await start_attempt(api.database, job["id"])
    await rank.report(api, *(checkpoint(step) for step in steps))
    return job, rank


async def _checkpoints(api: Api, job_id: str) -> list[dict[str, Any]]:
    return list((await api.admin.get(f"/v1/jobs/{job_id}/checkpoints")).json()["items"])


async def _end(api: Api, job_id: str, *path: Status) -> None:
    async with api.database.write() as tx:
        for status in path:
            assert await jobs.transition(tx, job_id, status, actor="controller", reason="finished") is not None


async def _fork(api: Api, job_id: str, **body: Any) -> dict[str, Any]:
    answer = await api.admin.post(f"/v1/jobs/{job_id}/fork", json=body)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


async def test_a_fork_begins_at_the_checkpoint_with_the_changes_that_were_asked(api: Api) -> None:
    """Its own id and spec, the parent's chunk and state; the same key gives the same job."""
    job, _ = await _saved(api, 10, 20)
    chosen = (await _checkpoints(api, job["id"]))[1]
    assert chosen["step"] == 10
    body = {"checkpoint": chosen["id"], "name": "枝", "spec": {"train": {"steps": 300}, "zero": {"stage": 3}}}
    answers = [
        await api.admin.post(f"/v1/jobs/{job['id']}/fork", json=body, headers={"Idempotency-Key": "f"})
        for _ in range(2)
    ]
    fork = answers[0].json()
    assert [a.status_code for a in answers] == [201, 200] and answers[1].json()["id"] == fork["id"]
    assert (fork["name"], fork["steps"], fork["stage"], fork["chunk"]) == ("枝", 300, 3, job["chunk"])
    assert (fork["cloned_from"], fork["forked_from"], fork["fork_step"], fork["step"]) == (
        job["id"],
        chosen["id"],
        10,
        10,
    )
    async with api.database.read() as connection:
        point = await checkpoints.resume_point(connection, fork["id"])
    assert point is not None and (point.id, point.job_id) == (chosen["id"], job["id"])
    other = await api.admin.post(f"/v1/jobs/{job['id']}/fork", json={}, headers={"Idempotency-Key": "f"})
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")


async def test_a_fork_that_the_layout_does_not_allow_is_refused_by_field(api: Api) -> None:
    """Before anything is queued: another width names the parameter, too few steps name both numbers."""
    job, _ = await _saved(api, 10)
    cases = {
        "/model": {"model": {"hidden": [128, 64, 16]}},
        "/train/steps": {"train": {"steps": 10}},
        "/train/optimizer/kind": {"train": {"optimizer": {"kind": "lion"}}},
        "/train/micro_batch": {"train": {"micro_batch": 0}},
        "/train/learning_rate": {"train": {"learning_rate": 1}},
        "/resources/ranks": {"resources": {"ranks": 5}},
    }
    for pointer, patch in cases.items():
        answer = await api.admin.post(f"/v1/jobs/{job['id']}/fork", json={"spec": patch})
        assert answer.status_code == 422, (pointer, answer.text)
        assert answer.json()["errors"][0]["pointer"] == pointer, answer.json()
    refused = await api.admin.post(f"/v1/jobs/{job['id']}/fork", json={"spec": cases["/model"]})
    assert "layers.2.weight" in refused.json()["detail"] and "[32, 64]" in refused.json()["detail"]
    assert len((await api.admin.get("/v1/jobs")).json()["items"]) == 1


async def test_nothing_is_forked_from_what_is_damaged_gone_or_not_there(api: Api) -> None:
    """409 with what is wrong; another job's checkpoint is not this one's."""
    job, _ = await _saved(api, 10, 20)
    newest, older = await _checkpoints(api, job["id"])
    other, _ = await _saved(api, 5, name="other")
    theirs = (await _checkpoints(api, other["id"]))[0]["id"]
    async with api.database.write() as tx:
        await checkpoints.set_status(tx, newest["id"], "corrupt", problem="scripted")
    path = f"/v1/jobs/{job['id']}/fork"
    assert (await api.admin.post(path, json={"checkpoint": newest["id"]})).status_code == 409
    assert (await api.admin.post(path, json={"checkpoint": theirs})).status_code == 404
    assert (await _fork(api, job["id"]))["forked_from"] == older["id"]
    empty = await api.submit("empty")
    answer = await api.admin.post(f"/v1/jobs/{empty['id']}/fork", json={})
    assert (answer.status_code, answer.json()["code"]) == (409, "no_checkpoint")


async def test_a_checkpoint_that_a_fork_needs_keeps_its_job_from_being_deleted(api: Api) -> None:
    """Until the fork has two usable ones of its own, or has ended."""
    job, _ = await _saved(api, 10)
    await _end(api, job["id"], Status.SUCCEEDED)
    fork = await _fork(api, job["id"], name="child")
    (held,) = await _checkpoints(api, job["id"])
    assert [need["job_id"] for need in held["needed_by"]] == [fork["id"]]
    refused = await api.admin.delete(f"/v1/jobs/{job['id']}")
    assert refused.status_code == 409 and "'child'" in refused.json()["detail"]
    rank = await start_attempt(api.database, fork["id"])
    await rank.report(api, checkpoint(20), checkpoint(30))
    assert (await _checkpoints(api, job["id"]))[0]["needed_by"] == []
    assert (await api.admin.delete(f"/v1/jobs/{job['id']}")).status_code == 202
    late = await api.admin.post(f"/v1/jobs/{job['id']}/fork", json={})
    assert (late.status_code, late.json()["code"]) == (409, "checkpoint_unusable")


async def test_a_cancelled_fork_resumes_at_its_origin_and_never_from_the_start(api: Api) -> None:
    """It has done no step of its own; where it was forked from is where it goes on, and 409 when that is gone."""
    job, _ = await _saved(api, 10)
    fork = await _fork(api, job["id"])
    path = f"/v1/jobs/{fork['id']}"
    assert (await api.admin.post(f"{path}/cancel")).json()["status"] == "cancelled"
    assert (await api.admin.post(f"{path}/resume")).status_code == 200
    async with api.database.read() as connection:
        point = await checkpoints.resume_point(connection, fork["id"])
    assert point is not None and point.step == 10
    await api.admin.post(f"{path}/cancel")
    async with api.database.write() as tx:
        await checkpoints.set_status(tx, point.id, "corrupt")
    answer = await api.admin.post(f"{path}/resume")
    assert (answer.status_code, answer.json()["code"]) == (409, "no_checkpoint")


async def test_a_clone_takes_any_change_that_is_a_valid_spec(api: Api) -> None:
    """Step 0, so another model too; a wrong field is named."""
    job, _ = await _saved(api, 10)
    path = f"/v1/jobs/{job['id']}/clone"
    clone = (await api.admin.post(path, json={"spec": {"model": {"hidden": [16]}, "train": {"seed": 7}}})).json()
    assert (clone["spec"]["model"]["hidden"], clone["spec"]["train"]["seed"], clone["step"]) == ([16], 7, 0)
    assert clone["forked_from"] is None
    wrong = await api.admin.post(path, json={"spec": {"model": {"hiden": [16]}}})
    assert wrong.status_code == 422 and wrong.json()["errors"][0]["suggestion"]


async def test_the_lineage_has_attempts_forks_clones_and_reshards(api: Api) -> None:
    """The same family from every member of it, each with its own generation; what is not there is 404."""
    job, _ = await _saved(api, 10, 20)
    fork = await _fork(api, job["id"], name="fork")
    clone = (await api.admin.post(f"/v1/jobs/{job['id']}/clone", json={"name": "clone"})).json()
    grandchild = (await api.admin.post(f"/v1/jobs/{fork['id']}/clone", json={"name": "grandchild"})).json()
    seen = (await api.admin.get(f"/v1/jobs/{job['id']}/lineage")).json()
    kinds = {each["id"]: (each["kind"], each["generation"]) for each in seen["jobs"]}
    assert kinds == {
        job["id"]: ("original", 0),
        fork["id"]: ("fork", 1),
        clone["id"]: ("clone", 1),
        grandchild["id"]: ("clone", 2),
    }
    (forked,) = [link for link in seen["links"] if link["kind"] == "fork"]
    assert (forked["from_job"], forked["from_attempt"], forked["step"], forked["to_job"]) == (
        job["id"],
        1,
        20,
        fork["id"],
    )
    upwards = (await api.admin.get(f"/v1/jobs/{grandchild['id']}/lineage")).json()
    assert [(each["name"], each["generation"]) for each in upwards["jobs"]] == [
        ("parent", -2),
        ("fork", -1),
        ("grandchild", 0),
    ]


async def test_a_resume_on_other_ranks_is_a_reshard_in_the_lineage(api: Api) -> None:
    """Attempt 2 begins at attempt 1's checkpoint with another number of ranks."""
    job, _ = await _saved(api, 10)
    (point,) = await _checkpoints(api, job["id"])
    await _end(api, job["id"], Status.FAILED)
    await api.admin.post(f"/v1/jobs/{job['id']}/resume", json={"ranks": 1})
    await start_attempt(api.database, job["id"], ranks=1, resume_step=10, resume_checkpoint=point["id"])
    seen = (await api.admin.get(f"/v1/jobs/{job['id']}/lineage")).json()
    (link,) = seen["links"]
    assert (link["kind"], link["from_attempt"], link["to_attempt"]) == ("resume", 1, 2)
    assert (link["from_ranks"], link["to_ranks"], link["resharded"]) == (2, 1, True)
    assert [(a["number"], a["first_step"]) for a in seen["jobs"][0]["attempts"]] == [(1, 0), (2, 10)]


async def test_the_preflight_says_what_each_rank_reads_and_whether_it_fits(api: Api) -> None:
    """From the checkpoint's own layout: rank by rank all bytes at stage 1, everything on each at stage 0."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    layout = Layout.build(parameters_of(JobSpec.model_validate(job["spec"])))
    made = ByHand(LocalStore(api.settings.job_store(job["id"])), step=10, layout=layout)
    made.publish()
    await rank.report(api, {**checkpoint(10), "folder": made.folder}, checkpoint(20))
    newest, _ = await _checkpoints(api, job["id"])
    async with api.database.write() as tx:
        await checkpoints.set_status(tx, newest["id"], "corrupt", problem="rank-00001 is missing")
    path = f"/v1/jobs/{job['id']}/preflight"
    spread = (await api.admin.post(path, json={"ranks": 4, "zero": {"stage": 1}})).json()
    whole = (await api.admin.post(path, json={"ranks": 2, "zero": {"stage": 0}})).json()
    assert (spread["step"], spread["from_ranks"], spread["ranks"], spread["stage"]) == (10, 2, 4, 1)
    assert spread["resharded"] and len(spread["read_bytes"]) == 4
    assert whole["read_bytes"] == [sum(spread["read_bytes"])] * 2
    assert [(p["step"], p["why"]) for p in spread["passed_over"]] == [(20, "rank-00001 is missing")]
    assert spread["fits"] and spread["plan"]["total_bytes"] == sum(spread["plan"]["memory"].values())
    refused = await api.admin.post(path, json={"ranks": 5})
    assert refused.status_code == 422


async def test_preflights_and_forks_pass_over_a_manifest_that_cannot_be_read_as_the_ranks_will(api: Api) -> None:
    """Its row does not know yet that it is damaged; an older one is taken and the reason said. Named, it is refused."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    layout = Layout.build(parameters_of(JobSpec.model_validate(job["spec"])))
    store = LocalStore(api.settings.job_store(job["id"]))
    older, newer = (ByHand(store, step=step, layout=layout) for step in (10, 20))
    older.publish()
    await rank.report(api, {**checkpoint(10), "folder": older.folder}, {**checkpoint(20), "folder": newer.folder})
    path = f"/v1/jobs/{job['id']}/preflight"
    found = (await api.admin.post(path, json={})).json()
    assert found["step"] == 10 and sum(found["read_bytes"]) > 0
    assert [(p["step"], p["why"]) for p in found["passed_over"]] == [(20, f"{newer.folder}: {GONE}")]
    named = (await _checkpoints(api, job["id"]))[0]
    assert (await _fork(api, job["id"]))["fork_step"] == 10
    for request in ("preflight", "fork"):
        refused = await api.admin.post(f"/v1/jobs/{job['id']}/{request}", json={"checkpoint": named["id"]})
        assert (refused.status_code, refused.json()["code"]) == (409, "checkpoint_unreadable")
