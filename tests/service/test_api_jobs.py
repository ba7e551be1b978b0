"""Jobs over REST: submit, list, read, change, act; on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Any

from sqlalchemy import func, select, update

from server.ids import is_id, new_id
from server.models import Event, Job
from server.rows import jobs
from server.states import Status
from tests.service.conftest import SPEC, Api
from tests.service.reports_by_hand import checkpoint, start_attempt
from workers.calibrations import calibration_file, this_machine
from workers.step_time import Calibration


def _still(view: dict[str, Any]) -> dict[str, Any]:
    """A job's view without the age of its ranks' last words, which grows by itself."""
    attempt = view["current_attempt"] or {"rank_states": []}
    ranks = [{**rank, "heartbeat_age_seconds": None} for rank in attempt["rank_states"]]
    return {**view, "current_attempt": {**attempt, "rank_states": ranks}}


async def _move(api: Api, job_id: str, *statuses: Status) -> None:
    for status in statuses:
        async with api.database.write() as tx:
            assert await jobs.transition(tx, job_id, status, actor="controller", reason="submitted") is not None


async def _all_pages(api: Api, **query: Any) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        answer = await api.admin.get("/v1/jobs", params={**query, **({"cursor": cursor} if cursor else {})})
        assert answer.status_code == 200, answer.text
        items += answer.json()["items"]
        cursor = answer.json()["next_cursor"]
        if cursor is None:
            return items


# --- submit and read


async def test_a_submitted_job_is_queued_and_read_back_the_same(api: Api) -> None:
    """POST answers 201 with a Location; GET answers the same body and the version as ETag; the controller is woken."""
    answer = await api.admin.post("/v1/jobs", json=SPEC)
    assert answer.status_code == 201
    job = answer.json()
    assert (job["status"], job["desired"], job["reason"]["code"]) == ("queued", "run", "submitted")
    assert is_id(job["id"]) and job["chunk"] == 2 and job["micro_batches"] == 4
    again = await api.admin.get(answer.headers["location"])
    assert again.json() == job
    assert again.headers["etag"] == '"1"'
    assert api.woken


async def test_yaml_and_json_make_the_same_spec(api: Api) -> None:
    """The two content types differ in the text kept, in nothing else."""
    text = "name: digits\nmodel: {kind: mlp}\ndata: {kind: digits}\ntrain: {steps: 100}\n"
    as_yaml = await api.admin.post("/v1/jobs", content=text, headers={"Content-Type": "application/yaml"})
    assert as_yaml.status_code == 201, as_yaml.text
    assert as_yaml.json()["spec_yaml"] == text
    assert as_yaml.json()["spec"] == (await api.submit())["spec"]


async def test_the_plan_made_at_submit_is_kept_and_decides_an_automatic_stage(api: Api) -> None:
    """`stage: auto` shows a number, and the plan beside it has all four stages."""
    job = await api.submit()
    plan = (await api.admin.get(f"/v1/jobs/{job['id']}/plan")).json()
    assert [s["stage"] for s in plan["predicted"]["stages"]] == [0, 1, 2, 3]
    assert job["stage"] == plan["predicted"]["advised_stage"]


async def test_a_job_shows_its_measured_step_beside_the_predicted_one(api: Api) -> None:
    """With a calibration in the data folder a submit predicts seconds; the attempt's median stands beside them."""
    file = calibration_file(api.settings.data_dir, this_machine("cpu"))
    file.parent.mkdir(parents=True)
    rates = {name: 1e9 for name, field in Calibration.model_fields.items() if field.annotation is float}
    file.write_text(json.dumps({**asdict(this_machine("cpu")), **rates}))
    job = await api.submit(zero={"stage": 1})
    before = (await api.admin.get(f"/v1/jobs/{job['id']}/plan")).json()
    assert before["predicted_seconds"] == before["predicted"]["stages"][1]["step_seconds"]["total"] > 0
    assert before["measured_seconds"] is None and before["error"] is None
    rank = await start_attempt(api.database, job["id"])
    await rank.points(api, {step: {"seconds": seconds} for step, seconds in ((1, 9.0), (2, 0.5), (3, 0.25))})
    after = (await api.admin.get(f"/v1/jobs/{job['id']}/plan")).json()
    assert after["measured_seconds"] == 0.5 and after["error"] == before["predicted_seconds"] / 0.5 - 1


async def test_a_name_in_any_script_is_text_and_nothing_else(api: Api) -> None:
    """Names come back exactly, whatever they look like."""
    for name in ("学習ジョブ", "<script>alert(1)</script>", "../../etc/passwd", "ñ\u0301 🏗", "'; DROP TABLE jobs; --"):
        job = await api.submit(name)
        assert (await api.admin.get(f"/v1/jobs/{job['id']}")).json()["name"] == name


# --- idempotency


async def test_fifty_submits_with_one_key_make_one_job(api: Api) -> None:
    """Whatever the interleaving: one job, one 201, and every answer names it."""
    posts = [api.admin.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "k"}) for _ in range(50)]
    answers = await asyncio.gather(*posts)
    assert {a.status_code for a in answers} <= {200, 201}
    assert [a.status_code for a in answers].count(201) == 1
    assert len({a.json()["id"] for a in answers}) == 1
    assert len(await _all_pages(api)) == 1


async def test_a_key_with_another_body_is_refused_and_another_users_key_is_another_key(api: Api) -> None:
    """422 with its own code; keys belong to who sent them."""
    key = {"Idempotency-Key": "k"}
    first = await api.admin.post("/v1/jobs", json=SPEC, headers=key)
    other = await api.admin.post("/v1/jobs", json={**SPEC, "name": "other"}, headers=key)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    async with await api.as_user("ada", "member") as ada:
        theirs = await ada.post("/v1/jobs", json=SPEC, headers=key)
    assert theirs.status_code == 201 and theirs.json()["id"] != first.json()["id"]


async def test_key_order_and_white_space_do_not_make_another_body(api: Api) -> None:
    """The body is compared by what it says."""
    key = {"Idempotency-Key": "k"}
    first = await api.admin.post("/v1/jobs", json=SPEC, headers=key)
    shuffled = await api.admin.post("/v1/jobs", json=dict(reversed(SPEC.items())), headers=key)
    assert (shuffled.status_code, shuffled.json()["id"]) == (200, first.json()["id"])


# --- lists


async def test_pages_cover_every_job_once_in_order(api: Api) -> None:
    """Keyset pages of any size are the whole list, equal keys and absent losses included."""
    for index in range(11):
        job = await api.submit(f"job {index % 4}")
        async with api.database.write() as tx:
            loss = None if index % 3 == 0 else float(index % 2)
            await tx.execute(update(Job).where(Job.id == job["id"]).values(loss=loss, step=index % 5))
    for sort in ("created_at", "-created_at", "name", "-name", "status", "-loss", "loss", "-step"):
        whole = await _all_pages(api, sort=sort, limit=200)
        assert len(whole) == 11
        for limit in (1, 2, 5):
            assert await _all_pages(api, sort=sort, limit=limit) == whole, (sort, limit)
        key = sort.lstrip("-")
        values = [item[key] for item in whole if item[key] is not None]
        assert values == sorted(values, reverse=sort.startswith("-")), sort
        absent = [item[key] for item in whole[len(values) :]]
        assert absent == [None] * (11 - len(values)), sort


async def test_jobs_inserted_while_paging_neither_repeat_nor_hide_others(api: Api) -> None:
    """A page after the cursor does not depend on what came in before it."""
    old = [(await api.submit(f"old {i}"))["id"] for i in range(6)]
    first = (await api.admin.get("/v1/jobs", params={"limit": 3})).json()
    for index in range(4):
        await api.submit(f"new {index}")
    rest = await api.admin.get("/v1/jobs", params={"limit": 50, "cursor": first["next_cursor"]})
    seen = [item["id"] for item in [*first["items"], *rest.json()["items"]]]
    assert seen == list(reversed(old))


async def test_filters_and_counts_agree(api: Api) -> None:
    """Status filters the items and not the counts; search and tags filter both."""
    a, b = await api.submit("Größe eins", tags=["x"]), await api.submit("Grösse zwei", tags=["x", "y"])
    await api.submit("other")
    await api.admin.post(f"/v1/jobs/{a['id']}/cancel")
    found = (await api.admin.get("/v1/jobs", params={"q": "GRÖSSE"})).json()
    assert {item["id"] for item in found["items"]} == {a["id"], b["id"]}
    assert found["counts"] == {"cancelled": 1, "queued": 1}
    found = (await api.admin.get("/v1/jobs", params={"status": "queued", "tag": "x"})).json()
    assert [item["id"] for item in found["items"]] == [b["id"]]
    assert found["counts"] == {"cancelled": 1, "queued": 1}
    by_id = (await api.admin.get("/v1/jobs", params={"q": a["id"][-8:]})).json()
    assert [item["id"] for item in by_id["items"]] == [a["id"]]
    none = (await api.admin.get("/v1/jobs", params={"q": "100%_"})).json()
    assert none["items"] == []


async def test_a_list_item_agrees_with_the_job(api: Api) -> None:
    """What both show is the same."""
    job = await api.submit()
    (item,) = (await api.admin.get("/v1/jobs")).json()["items"]
    assert item == {key: job[key] for key in item}


# --- change


async def test_of_two_people_who_patch_one_version_the_second_is_told(api: Api) -> None:
    """If-Match: 412 after somebody else's change, and nothing of the second change is there."""
    job = await api.submit()
    path, seen = f"/v1/jobs/{job['id']}", {"If-Match": '"1"'}
    first = await api.admin.patch(path, json={"priority": 80}, headers=seen)
    assert (first.status_code, first.json()["priority"], first.headers["etag"]) == (200, 80, '"2"')
    second = await api.admin.patch(path, json={"name": "mine"}, headers=seen)
    assert (second.status_code, second.json()["code"]) == (412, "precondition_failed")
    assert (await api.admin.get(path)).json()["name"] == "digits"


async def test_priority_may_change_while_it_has_an_effect(api: Api) -> None:
    """Queued and running: 200. Stopping: 409 with the state."""
    job = await api.submit()
    path = f"/v1/jobs/{job['id']}"
    await start_attempt(api.database, job["id"])
    assert (await api.admin.patch(path, json={"priority": 1})).status_code == 200
    await api.admin.post(f"{path}/cancel")
    refused = await api.admin.patch(path, json={"priority": 2})
    assert (refused.status_code, refused.json()["job_status"]) == (409, "stopping")


async def test_tags_that_were_patched_are_found(api: Api) -> None:
    """The filter sees new tags and forgets old ones; the spec shows them."""
    job = await api.submit(tags=["old"])
    patched = await api.admin.patch(f"/v1/jobs/{job['id']}", json={"tags": ["new", "new2"]})
    assert patched.json()["spec"]["tags"] == ["new", "new2"]
    assert len(await _all_pages(api, tag="new2")) == 1 and len(await _all_pages(api, tag="old")) == 0


# --- actions


async def test_a_repeated_action_answers_the_same_and_writes_nothing(api: Api) -> None:
    """Cancel twice: same body, same version, one event."""
    job = await api.submit()
    first = await api.admin.post(f"/v1/jobs/{job['id']}/cancel")
    again = await api.admin.post(f"/v1/jobs/{job['id']}/cancel")
    assert first.json()["status"] == "cancelled"
    assert again.json() == first.json()
    events = (await api.admin.get(f"/v1/jobs/{job['id']}/events")).json()["items"]
    assert [e["action"] for e in events] == ["job.cancelled", "job.submitted"]
    assert (events[0]["old"], events[0]["new"], events[0]["actor"]) == ("queued", "cancelled", "user:admin")


async def test_an_impossible_action_names_the_state_and_what_is_possible(api: Api) -> None:
    """409 with the present status and allowed actions."""
    job = await api.submit()
    await api.admin.post(f"/v1/jobs/{job['id']}/cancel")
    refused = await api.admin.post(f"/v1/jobs/{job['id']}/pause")
    assert refused.status_code == 409
    problem = refused.json()
    assert (problem["code"], problem["job_status"]) == ("illegal_action", "cancelled")
    assert problem["allowed_actions"] == (await api.admin.get(f"/v1/jobs/{job['id']}")).json()["allowed_actions"]


async def test_a_live_job_stops_and_may_be_stopped_harder_but_not_milder(api: Api) -> None:
    """pause < cancel < kill; a milder wish is satisfied already."""
    job = await api.submit()
    await start_attempt(api.database, job["id"])
    path = f"/v1/jobs/{job['id']}"
    seen = [(await api.admin.post(f"{path}/{action}")).json() for action in ("pause", "cancel", "pause", "kill")]
    assert [(v["status"], v["desired"]) for v in seen] == [
        ("stopping", "pause"),
        ("stopping", "cancel"),
        ("stopping", "cancel"),
        ("stopping", "kill"),
    ]


async def test_delete_is_for_ended_jobs_and_marks_them(api: Api) -> None:
    """A queued job: 409; a cancelled one: 202 and `deleting`, also the second time."""
    job = await api.submit()
    path = f"/v1/jobs/{job['id']}"
    assert (await api.admin.delete(path)).status_code == 409
    await api.admin.post(f"{path}/cancel")
    for _ in range(2):
        answer = await api.admin.delete(path)
        assert (answer.status_code, answer.json()["status"]) == (202, "deleting")


async def test_a_hundred_waiting_jobs_are_cancelled_together(api: Api) -> None:
    """A result for each, one event for each, and ids that mean nothing are named."""
    ids = [(await api.submit(f"{i}"))["id"] for i in range(100)]
    await start_attempt(api.database, ids[0])
    answer = await api.admin.post("/v1/jobs/cancel", json={"ids": [*ids, new_id(), "../x"]})
    results = {r["id"]: r for r in answer.json()["results"]}
    assert len(results) == 102
    assert results[ids[0]]["status"] == "stopping"
    assert all(results[i]["ok"] and results[i]["status"] == "cancelled" for i in ids[1:])
    assert sum(not r["ok"] for r in results.values()) == 2
    async with api.database.read() as connection:
        told = await connection.scalar(select(func.count()).where(Event.action == "job.cancelled"))
    assert told == 99


async def test_cancel_all_among_submits_names_every_job_it_covered(api: Api) -> None:
    """After 20 submits with a cancel-all in the middle, each job is cancelled exactly when the answer lists it."""
    submits = [api.submit(f"{i}") for i in range(20)]
    bulk = api.admin.post("/v1/jobs/cancel", json={"filter": {"status": "queued"}})
    *made, answer = await asyncio.gather(*submits[:10], *submits[10:], bulk)
    covered = {r["id"] for r in answer.json()["results"] if r["ok"]}
    cancelled = {j["id"] for j in await _all_pages(api, status="cancelled")}
    assert covered == cancelled
    assert len(made) == 20


async def test_bulk_cancel_wants_ids_or_a_filter(api: Api) -> None:
    """Neither and both are 422; an empty filter is everything on purpose."""
    for body in ({}, {"ids": [], "filter": {}}, {"filter": {"status": "sleeping"}}, {"filter": {"nmae": "x"}}):
        assert (await api.admin.post("/v1/jobs/cancel", json=body)).status_code == 422
    await api.submit()
    assert len((await api.admin.post("/v1/jobs/cancel", json={"filter": {}})).json()["results"]) == 1


# --- resume and clone


async def test_resume_takes_other_ranks_stage_and_steps_and_keeps_the_chunk(api: Api) -> None:
    """A new desired state and a changed spec; C stays the number of the submit; the list shows the same as the job."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    await rank.report(api, checkpoint(10))
    await _move(api, job["id"], Status.FAILED)
    body = {"ranks": 1, "zero": {"stage": 3}, "train": {"steps": 200}}
    answer = await api.admin.post(f"/v1/jobs/{job['id']}/resume", json=body)
    resumed = answer.json()
    assert answer.status_code == 200, resumed
    assert (resumed["status"], resumed["desired"], resumed["reason"]["code"]) == ("queued", "run", "resumed")
    assert (resumed["ranks"], resumed["stage"], resumed["steps"], resumed["chunk"]) == (1, 3, 200, 2)
    assert resumed["spec"]["train"]["chunk"] == 2 and resumed["spec"]["resources"]["ranks"] == 1
    (item,) = (await api.admin.get("/v1/jobs")).json()["items"]
    assert item["status"] == "queued"
    again = await api.admin.post(f"/v1/jobs/{job['id']}/resume", json=body)
    assert _still(again.json()) == _still(resumed)
    other = await api.admin.post(f"/v1/jobs/{job['id']}/resume", json={"ranks": 2})
    assert other.status_code == 409


async def test_resume_without_a_usable_checkpoint_is_refused_when_steps_would_be_lost(api: Api) -> None:
    """It never starts from scratch silently: 409 names the way out. A job that did no step yet may go on."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    await rank.points(api, {1: {"loss": 1.0}})
    await _move(api, job["id"], Status.FAILED)
    refused = await api.admin.post(f"/v1/jobs/{job['id']}/resume")
    assert (refused.status_code, refused.json()["code"]) == (409, "no_checkpoint")
    fresh = await api.submit()
    await api.admin.post(f"/v1/jobs/{fresh['id']}/cancel")
    assert (await api.admin.post(f"/v1/jobs/{fresh['id']}/resume")).status_code == 200


async def test_resume_checks_what_it_is_asked(api: Api) -> None:
    """Too many ranks, a foreign checkpoint, all steps done: each is refused and the job stays as it was."""
    job, other = await api.submit(), await api.submit()
    rank = await start_attempt(api.database, job["id"])
    await rank.report(api, checkpoint(100))
    theirs = await start_attempt(api.database, other["id"])
    await theirs.report(api, checkpoint(5))
    await _move(api, job["id"], Status.SUCCEEDED)
    path = f"/v1/jobs/{job['id']}"
    foreign = (await api.admin.get(f"/v1/jobs/{other['id']}/checkpoints")).json()["items"][0]["id"]
    before = (await api.admin.get(path)).json()
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 409),
        ({"train": {"steps": 100}}, 409),
        ({"ranks": 5}, 422),
        ({"ranks": 65}, 422),
        ({"ranks": 0}, 422),
        ({"checkpoint": foreign, "train": {"steps": 200}}, 404),
        ({"checkpoint": "../../x", "train": {"steps": 200}}, 404),
        ({"zero": {"stage": 4}}, 422),
        ({"ranks": "2"}, 422),  # no text is read as a number, as in a spec
        ({"train": {"steps": "200"}}, 422),
        ({"unknown": 1}, 422),
    ]
    for body, status in cases:
        answer = await api.admin.post(f"{path}/resume", json=body)
        assert answer.status_code == status, (body, answer.text)
    assert _still((await api.admin.get(path)).json()) == _still(before)
    more = await api.admin.post(f"{path}/resume", json={"train": {"steps": 200}})
    assert (more.status_code, more.json()["status"]) == (200, "queued")


async def test_a_clone_is_a_new_job_of_the_same_spec(api: Api) -> None:
    """Its own id, from step 0, the chunk as a number, where it came from, and idempotent like a submit."""
    job = await api.submit()
    key = {"Idempotency-Key": "c"}
    answers = [
        await api.admin.post(f"/v1/jobs/{job['id']}/clone", json={"name": "copy", "ranks": 1}, headers=key)
        for _ in range(2)
    ]
    clone = answers[0].json()
    assert [a.status_code for a in answers] == [201, 200]
    assert answers[1].json()["id"] == clone["id"] != job["id"]
    assert (clone["name"], clone["ranks"], clone["chunk"], clone["cloned_from"]) == ("copy", 1, 2, job["id"])


async def test_a_paused_job_pins_what_it_resumes_from_and_a_cancelled_one_does_not(api: Api) -> None:
    """The newest checkpoint is pinned while paused; cancel takes the pin away."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    await rank.report(api, checkpoint(10), checkpoint(20))
    await _move(api, job["id"], Status.STOPPING, Status.PAUSED)
    path = f"/v1/jobs/{job['id']}"
    pins = [(c["step"], c["pinned"]) for c in (await api.admin.get(f"{path}/checkpoints")).json()["items"]]
    assert pins == [(20, True), (10, False)]
    await api.admin.post(f"{path}/cancel")
    assert not any(c["pinned"] for c in (await api.admin.get(f"{path}/checkpoints")).json()["items"])


# --- queue and explanation


async def test_the_queue_is_in_the_order_of_start_and_says_why_each_waits(api: Api) -> None:
    """Higher priority first, then the time of submit; explain agrees with the queue."""
    low, first, second = [await api.submit(n, priority=p) for n, p in (("low", 10), ("a", 50), ("b", 50))]
    queue = (await api.admin.get("/v1/queue")).json()["items"]
    assert [item["job_id"] for item in queue] == [first["id"], second["id"], low["id"]]
    assert [item["position"] for item in queue] == [1, 2, 3]
    said = (await api.admin.get(f"/v1/jobs/{low['id']}/explain")).json()
    assert (said["position"], said["jobs_ahead"]) == (3, [first["id"], second["id"]])
    assert said["unblock"] and said["sentence"]


SUBRESOURCES = ("attempts", "events", "metrics", "memory", "ledger", "logs", "checkpoints", "plan", "explain")


async def test_every_route_of_an_unknown_job_answers_404(api: Api) -> None:
    """Never an empty list for a job that is not there, and no path out of the data."""
    for job_id in (new_id(), "nonsense", "..%2f..%2fetc", "%2e%2e", "C:", "..%5c.."):
        for rest in ("", *(f"/{name}" for name in SUBRESOURCES)):
            answer = await api.admin.get(f"/v1/jobs/{job_id}{rest}")
            assert answer.status_code == 404, (job_id, rest, answer.text)
        for action in ("cancel", "kill", "pause", "resume", "clone"):
            assert (await api.admin.post(f"/v1/jobs/{job_id}/{action}")).status_code in (404, 405)
