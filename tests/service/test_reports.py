"""Reports: applied once whatever the network does, stored late without moving states, refused whole when wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.rows import attempts, checkpoints, jobs
from server.states import AttemptStatus, Status
from tests.service.conftest import Api
from tests.service.counted_statements import counted_statements
from tests.service.reports_by_hand import Rank, at, checkpoint, log, phase, points, save, start_attempt
from workers.contract import CheckpointRecord


async def _series(api: Api, job_id: str, name: str = "loss") -> list[dict[str, Any]]:
    answer = await api.admin.get(f"/v1/jobs/{job_id}/metrics", params={"names": name})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["series"])


async def _values(api: Api, job_id: str, name: str = "loss") -> list[tuple[int, Any]]:
    line = next(s for s in await _series(api, job_id, name) if not s["branch"])
    return [(p["step"], p["value"]) for p in line["points"]]


async def _log_text(api: Api, job_id: str, **query: Any) -> list[str]:
    answer = await api.admin.get(f"/v1/jobs/{job_id}/logs", params=query)
    return [line["text"] for line in answer.json()["items"]]


# --- applied once


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(deliveries=st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=25))
async def test_any_repeats_reorderings_and_lost_answers_apply_each_batch_once(
    api: Api, deliveries: list[tuple[int, bool]]
) -> None:
    """After any deliveries of eight batches, and then each in its turn, everything is there once, in order."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    batches = [
        rank.batch(points(step, {"loss": step / 2}), log(f"line {step}\n"), checkpoint(step)) for step in range(1, 9)
    ]
    applied = 0
    for index, answer_arrives in deliveries:
        answer = await rank.post(api, batches[index])
        applied = max(applied, index + 1) if index + 1 <= applied + 1 else applied
        if answer_arrives:
            assert answer.json() == {"applied_seq": applied}
    while applied < 8:
        applied = (await rank.post(api, batches[applied])).json()["applied_seq"]
    assert await _values(api, job["id"]) == [(step, step / 2) for step in range(1, 9)]
    assert await _log_text(api, job["id"]) == [f"line {step}" for step in range(1, 9)]
    steps = [c["step"] for c in (await api.admin.get(f"/v1/jobs/{job['id']}/checkpoints")).json()["items"]]
    assert steps == list(range(8, 0, -1))


async def test_a_gap_is_answered_with_where_to_go_on(api: Api) -> None:
    """Batch 3 before 2: nothing is applied, the answer names 1."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    await rank.points(api, {1: {"loss": 1.0}})
    second, third = rank.batch(points(2, {"loss": 2.0})), rank.batch(points(3, {"loss": 3.0}))
    assert (await rank.post(api, third)).json() == {"applied_seq": 1}
    assert (await rank.post(api, second)).json() == {"applied_seq": 2}
    assert (await rank.post(api, third)).json() == {"applied_seq": 3}
    assert await _values(api, job["id"]) == [(1, 1.0), (2, 2.0), (3, 3.0)]


async def test_ranks_number_their_batches_independently(api: Api) -> None:
    """Two ranks' seq 1 are two batches."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    other = rank.peer(1)
    await rank.report(api, log("zero\n"))
    await other.report(api, log("one\n"))
    assert sorted(await _log_text(api, job["id"])) == ["one", "zero"]
    assert await _log_text(api, job["id"], rank=1) == ["one"]


# --- late


async def test_late_reports_of_an_ended_attempt_are_stored_and_move_no_status(api: Api) -> None:
    """The tail of a cancelled job is complete; its status stays, and so does every event of a transition."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    await rank.points(api, {1: {"loss": 1.0}})
    async with api.database.write() as tx:
        assert await jobs.transition(tx, job["id"], Status.STOPPING, actor="controller", reason="cancelled_by_user")
        assert await jobs.transition(tx, job["id"], Status.CANCELLED, actor="controller", reason="cancelled_by_user")
        await attempts.transition(
            tx, rank.attempt_id, AttemptStatus.RELEASED, allowed=[AttemptStatus.STARTING], released_at=tx.now
        )
    before = (await api.admin.get(f"/v1/jobs/{job['id']}")).json()
    await rank.report(api, phase("training"), points(2, {"loss": 0.5}), log("the last words"), closed=True)
    after = (await api.admin.get(f"/v1/jobs/{job['id']}")).json()
    assert (after["status"], after["phase"], after["version"]) == ("cancelled", None, before["version"])
    assert await _values(api, job["id"]) == [(1, 1.0), (2, 0.5)]
    assert await _log_text(api, job["id"]) == ["the last words"]


async def test_an_old_attempt_does_not_move_the_numbers_of_a_newer_one(api: Api) -> None:
    """Step, loss and sparkline are the newest attempt's; the old one's points are a branch."""
    job = await api.submit()
    old = await start_attempt(api.database, job["id"])
    await old.points(api, {step: {"loss": 10.0} for step in range(1, 7)})
    async with api.database.write() as tx:
        assert await jobs.transition(tx, job["id"], Status.QUEUED, actor="controller", reason="retrying")
    new = await start_attempt(api.database, job["id"])
    await new.points(api, {4: {"loss": 1.0}, 5: {"loss": 2.0}})
    await old.points(api, {7: {"loss": 11.0}})
    view = (await api.admin.get(f"/v1/jobs/{job['id']}")).json()
    assert (view["step"], view["loss"], view["attempt"]) == (5, 2.0, 2)
    line, branch = await _series(api, job["id"])
    assert [(p["step"], p["value"]) for p in line["points"]] == [(1, 10.0), (2, 10.0), (3, 10.0), (4, 1.0), (5, 2.0)]
    assert (branch["branch"], branch["attempt"]) == (True, 1)
    assert [p["step"] for p in branch["points"]] == [4, 5, 6, 7]
    steps = [p["step"] for p in line["points"]]
    assert steps == sorted(set(steps)), "a step goes backwards or stands twice"


# --- refused


@pytest.mark.parametrize(
    ("record", "pointer"),
    [
        (points(2**53 + 1, {"loss": 1.0}), "/records/1/step"),
        ({**points(1, {}), "values": {"loss": [1.0, 2.0]}}, "/records/1/points/values/loss"),
        ({**points(1, {}), "values": {"loss": "a tensor"}}, "/records/1/points/values/loss"),
        ({**points(1, {}), "at": "2026-01-01T00:00:00"}, "/records/1/points/at"),
        ({**points(1, {}), "extra": 1}, "/records/1/points/extra"),
        ({"kind": "gossip"}, "/records/1"),
        ({**points(1, {}), "step": -1}, "/records/1/points/step"),
    ],
)
async def test_a_batch_with_one_bad_record_is_refused_whole_and_names_it(
    api: Api, record: dict[str, Any], pointer: str
) -> None:
    """422 with the record's pointer; nothing of the batch is stored; the same seq may be sent again, mended."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    answer = await rank.post(api, rank.batch(points(1, {"loss": 1.0}), record))
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_record")
    assert any(e["pointer"].startswith(pointer) for e in answer.json()["errors"]), answer.text
    assert await _series(api, job["id"]) == []
    rank.seq -= 1
    await rank.points(api, {1: {"loss": 1.0}})
    assert await _values(api, job["id"]) == [(1, 1.0)]


async def test_only_the_attempts_own_token_fence_and_ranks_are_believed(api: Api) -> None:
    """401 without a token or with another one, 403 for another fence, 404 for a rank that is not there."""
    first, second = await api.submit(), await api.submit()
    rank, other = await start_attempt(api.database, first["id"]), await start_attempt(api.database, second["id"])
    batch = rank.batch(points(1, {"loss": 1.0}))
    assert (await api.nobody.post("/v1/reports", json=batch)).status_code == 401
    assert (await api.admin.post("/v1/reports", json=batch)).status_code == 401
    assert (await other.post(api, batch)).status_code == 401
    assert (await rank.post(api, {**batch, "fence": 2})).status_code == 403
    assert (await rank.post(api, {**batch, "rank": 2})).status_code == 404
    assert (await rank.post(api, {**batch, "rank": -1})).status_code in (404, 422)
    assert await _series(api, first["id"]) == []


# --- what becomes of the records


async def test_non_finite_values_of_every_kind_come_back_as_themselves(api: Api) -> None:
    """NaN and both infinities are stored, marked in charts, named in JSON and CSV, and counted."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    values = {1: 1.0, 2: math.nan, 3: math.inf, 4: -math.inf, 5: 2.0}
    await rank.points(api, {step: {"loss": value} for step, value in values.items()})
    (line,) = await _series(api, job["id"])
    assert line["non_finite"] == [
        {"step": 2, "value": "NaN"},
        {"step": 3, "value": "Infinity"},
        {"step": 4, "value": "-Infinity"},
    ]
    assert (line["non_finite_count"], line["count"]) == (3, 5)
    assert [(p["step"], p["value"]) for p in line["points"]] == [(1, 1.0), (2, None), (5, 2.0)]
    csv = (await api.admin.get(f"/v1/jobs/{job['id']}/metrics", params={"format": "csv"})).text
    assert [row.split(",")[-1] for row in csv.splitlines()[1:]] == ["1.0", "NaN", "Infinity", "-Infinity", "2.0"]
    await rank.points(api, {6: {"loss": math.nan}})
    item = (await api.admin.get("/v1/jobs")).json()["items"][0]
    assert item["loss"] == "NaN" and item["sparkline"][-1] is None
    names = (await api.admin.get(f"/v1/jobs/{job['id']}/metrics/names")).json()["series"]
    assert (names[0]["last"], names[0]["min"], names[0]["max"], names[0]["non_finite_count"]) == ("NaN", 1.0, 2.0, 4)


async def test_the_job_shows_step_loss_speed_and_time_left_from_its_points(api: Api) -> None:
    """The header's numbers are the newest points'; the time left is the steps left times the step's seconds."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    await rank.points(api, {1: {"loss": 4.0, "tokens_per_second": 100.0, "seconds": 0.5, "lr": 1e-3}})
    view = (await api.admin.get(f"/v1/jobs/{job['id']}")).json()
    assert (view["step"], view["loss"], view["tokens_per_second"], view["eta_seconds"]) == (1, 4.0, 100.0, 49.5)
    assert view["sparkline"] == [4.0]
    assert view["last_report_at"] is not None


async def test_the_phase_of_a_job_is_its_slowest_ranks(api: Api) -> None:
    """One rank still building: the job builds; the controller is woken by each word."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    other = rank.peer(1)
    woken = len(api.woken)
    await rank.report(api, phase("started"), phase("building"), phase("training"))
    await other.report(api, phase("building"))
    assert len(api.woken) >= woken + 2
    assert (await api.admin.get(f"/v1/jobs/{job['id']}")).json()["phase"] == "building"
    await other.report(api, phase("training"))
    view = (await api.admin.get(f"/v1/jobs/{job['id']}")).json()
    assert view["phase"] == "training"
    assert [r["phase"] for r in view["current_attempt"]["rank_states"]] == ["training", "training"]


async def test_a_save_is_shown_while_it_runs_and_where_its_time_went_afterwards(api: Api) -> None:
    """The end of an earlier save hides no later one, and an attempt that has ended saves nothing."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])

    async def saving() -> dict[str, Any] | None:
        view: dict[str, Any] = (await api.admin.get(f"/v1/jobs/{job['id']}")).json()
        found: dict[str, Any] | None = view["current_attempt"]["saving"]
        return found

    await rank.report(api, save(10, "begun"))
    assert (shown := await saving()) is not None and (shown["step"], shown["since"][:19]) == (10, at(10)[:19])
    await rank.report(api, save(20, "begun"), save(10, "ended"))
    assert (shown := await saving()) is not None and shown["step"] == 20
    parts = {"blocked": 0.0, "copy": 0.1, "write": 0.3, "publish": 0.1}
    await rank.report(api, save(20, "ended"), {**checkpoint(20), "seconds_by": parts}, checkpoint(21))
    assert await saving() is None
    items = (await api.admin.get(f"/v1/jobs/{job['id']}/checkpoints")).json()["items"]
    assert [item["seconds_by"] for item in items] == [{}, parts]
    await rank.report(api, save(30, "begun"))
    async with api.database.write() as tx:
        await attempts.set_values(tx, rank.attempt_id, reason="rank_died")
    assert await saving() is None


async def test_a_checkpoint_said_twice_is_one_row(api: Api) -> None:
    """The same folder from another batch, or after an absence, makes neither a second row nor a second event."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    await rank.report(api, checkpoint(10))
    await rank.report(api, checkpoint(10))
    (found,) = (await api.admin.get(f"/v1/jobs/{job['id']}/checkpoints")).json()["items"]
    assert (found["step"], found["bytes"], found["ranks"], found["status"]) == (10, 200, 2, "complete")
    events = (await api.admin.get(f"/v1/jobs/{job['id']}/events")).json()["items"]
    assert [e["action"] for e in events].count("checkpoint.saved") == 1


async def test_a_manifest_of_ten_thousand_shards_is_as_many_statements_as_one_of_two(api: Api) -> None:
    """One call of the driver for all rows of a checkpoint, whatever their number."""
    job = await api.submit()
    counts = []
    for step, ranks in ((1, 2), (2, 10_000)):
        record = CheckpointRecord.model_validate(checkpoint(step, ranks=ranks))
        with counted_statements(api.database) as statements:
            async with api.database.write() as tx:
                assert await checkpoints.record(tx, job["id"], 1, record) is not None
        counts.append(len(statements))
    assert counts[0] == counts[1] <= 6, counts
    path = f"/v1/jobs/{job['id']}/checkpoints"
    small, whole = await api.admin.get(path), await api.admin.get(path, params={"shards": True})
    assert [len(item["shards"]) for item in whole.json()["items"]] == [10_000, 2]
    assert [len(item["shards"]) for item in small.json()["items"]] == [0, 0] and len(small.content) < 2000


async def test_a_checkpoint_that_a_rank_refused_is_marked_and_named(api: Api) -> None:
    """An event says so; the one before is the newest usable. One that does not fit the model as it is now is whole."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    await rank.report(api, checkpoint(10), checkpoint(20))
    refused: dict[str, Any] = {
        "kind": "event",
        "at": checkpoint(20)["at"],
        "action": "checkpoint.refused",
        "message": "shard 1: block 3 has another checksum",
        "data": {"folder": checkpoint(20)["folder"], "damaged": True, "loss": "NaN"},
    }
    unfit = {**refused, "data": {"folder": checkpoint(10)["folder"], "damaged": False}}
    await rank.report(api, refused, unfit)
    items = (await api.admin.get(f"/v1/jobs/{job['id']}/checkpoints")).json()["items"]
    assert [(c["step"], c["status"]) for c in items] == [(20, "corrupt"), (10, "complete")]
    assert "block 3" in items[0]["problem"]


async def test_plan_ledger_and_memory_stand_beside_each_other(api: Api) -> None:
    """The engine's plan and what was measured, by rank and purpose; only the newest step of a rank is kept."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    when = points(1, {})["at"]
    plan = {
        "kind": "plan",
        "at": when,
        "memory": [{"params": 10, "grads": 5}, {"params": 9}],
        "traffic": [{"reduce": 100}, {"reduce": 90}],
        "parameters": 7,
        "stage": 1,
        "chunk": 2,
    }
    ledger = {"kind": "ledger", "at": when, "step": 2, "bytes": {"reduce": 100, "norm": 8}, "seconds": {"reduce": 0.1}}
    sample = {"kind": "memory", "at": when, "step": 2, "phase": "peak", "params": 10, "grads": 5, "rss": 1000}
    await rank.report(api, plan, ledger, {**ledger, "step": 1, "bytes": {}}, sample, {**sample, "step": 3, "rss": 2000})
    seen = (await api.admin.get(f"/v1/jobs/{job['id']}/ledger")).json()
    (first,) = seen["ranks"]
    assert (first["step"], first["planned_bytes"], first["measured_bytes"]) == (2, 100, 108)
    assert seen["planned_bytes"] == 190
    by_purpose = {e["purpose"]: (e["planned_bytes"], e["measured_bytes"]) for e in first["entries"]}
    assert by_purpose == {"reduce": (100, 100), "norm": (None, 8)}
    memory = (await api.admin.get(f"/v1/jobs/{job['id']}/memory")).json()
    assert memory["plan"] == plan["memory"]
    assert [(s["step"], s["rss"]) for s in memory["samples"]] == [(2, 1000), (3, 2000)]
    assert [(s["step"], s["rss"]) for s in memory["phases"]] == [(3, 2000)]
    assert [(s["stage"], s["bytes"]) for s in memory["paper"]] == [(0, 112), (1, 84), (2, 70), (3, 56)]
    thin = (await api.admin.get(f"/v1/jobs/{job['id']}/memory", params={"width": 1})).json()
    assert [(s["step"], s["rss"], s["params"]) for s in thin["samples"]] == [(3, 2000, 10)]


async def test_the_papers_lines_are_those_of_the_attempt_also_for_a_model_of_ones_own(api: Api, tmp_path: Path) -> None:
    """No plan is made at submit for a user's model; once its ranks have said its size, the paper's bytes are shown.

    P = 1000 in fp32: 16 P bytes at stage 0 and, on two ranks, 8 P at stage 3; this attempt, at stage 1, sends 2 P.
    """
    (tmp_path / "model.py").write_text("")
    model = {"kind": "python", "entry": "model:build", "path": str(tmp_path)}
    job = await api.submit(model=model, zero={"stage": 1})
    path = f"/v1/jobs/{job['id']}"
    rank = await start_attempt(api.database, job["id"])
    assert (await api.admin.get(f"{path}/memory")).json()["paper"] == []
    memory = [{"parameters": 1}, {"parameters": 1}]
    plan = {"kind": "plan", "memory": memory, "traffic": [{}, {}], "parameters": 1000, "stage": 1, "chunk": 2}
    await rank.report(api, {**plan, "at": points(1, {})["at"]})
    paper = (await api.admin.get(f"{path}/memory")).json()["paper"]
    assert [(line["stage"], line["bytes"]) for line in paper] == [(0, 16000), (1, 12000), (2, 10000), (3, 8000)]
    assert (await api.admin.get(f"{path}/ledger")).json()["paper_bytes"] == 8000


async def test_events_of_ranks_keep_their_data_and_their_time_of_arrival(api: Api) -> None:
    """A rank's event is shown with its rank, newest first, a page at a time."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    event = {"kind": "event", "at": points(1, {})["at"], "action": "eval.off", "message": "too short", "data": {"n": 1}}
    await rank.report(api, *[{**event, "data": {"n": n}} for n in range(5)])
    path = f"/v1/jobs/{job['id']}/events"
    first = (await api.admin.get(path, params={"limit": 3})).json()
    assert [e["data"]["n"] for e in first["items"]] == [4, 3, 2]
    rest = (await api.admin.get(path, params={"limit": 100, "cursor": first["next_cursor"]})).json()
    assert [e["data"].get("n") for e in rest["items"]][:2] == [1, 0]
    later = (await api.admin.get(path, params={"after": first["items"][1]["id"]})).json()
    assert [e["data"]["n"] for e in later["items"]] == [4]


async def test_thousand_series_in_a_batch_and_a_long_history_are_the_same_work(api: Api) -> None:
    """A batch of a thousand names is applied in one go, and its repeat touches nothing."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    await rank.points(api, {1: {f"m{i}": float(i) for i in range(1000)}})
    names = (await api.admin.get(f"/v1/jobs/{job['id']}/metrics/names")).json()["series"]
    assert len(names) == 1000
    assert (await rank.post(api, rank.sent[0])).json() == {"applied_seq": 1}
    again = (await api.admin.get(f"/v1/jobs/{job['id']}/metrics/names")).json()["series"]
    assert again == names


def test_ranks_by_hand_number_their_batches() -> None:
    """The sender of these tests counts as the real one."""
    rank = Rank("a", 1, 0, "t")
    assert [rank.batch()["seq"], rank.batch()["seq"]] == [1, 2]


async def test_each_phase_of_the_newest_watched_step_is_kept_with_its_activations(api: Api) -> None:
    """What the page shows within a step: categories of every phase, pinned memory among them, beside the peaks."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    when = points(1, {})["at"]
    names = ("forward", "backward", "reduce", "update", "gather", "peak")
    held = {"forward": 40, "backward": 60, "reduce": 20, "update": 1, "gather": 2, "peak": 60}
    for step in (1, 5):
        row = {"kind": "memory", "at": when, "step": step, "params": 10, "pinned": 7}
        await rank.report(api, *({**row, "phase": name, "activations": step * held[name]} for name in names))
    memory = (await api.admin.get(f"/v1/jobs/{job['id']}/memory")).json()
    found = {sample["phase"]: (sample["step"], sample["activations"], sample["pinned"]) for sample in memory["phases"]}
    assert found == {name: (5, 5 * held[name], 7) for name in names}
    assert {(sample["step"], sample["phase"]) for sample in memory["samples"]} == {
        (s, n) for s in (1, 5) for n in names
    }
