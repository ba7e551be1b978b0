"""What there is to see of a job: charts over chunks and rollups, logs, checkpoints; on SQLite and PostgreSQL."""

from __future__ import annotations

import csv
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load
from sqlalchemy import func, select, update

from server.ids import new_id
from server.models import PointChunk, PointTail, Rollup
from server.paging import write_cursor
from server.points import CHUNK_POINTS, COLUMNS, roll_up
from server.rows import checkpoints, chunks, jobs, logs, metrics, series
from server.rows.chunks import Extent
from server.rows.readings import GONE
from server.states import Status
from tests.service.conftest import Api
from tests.service.reports_by_hand import Rank, checkpoint, log, points, start_attempt
from tests.unit.checkpoint_by_hand import ByHand
from workers.contract import CheckpointRecord
from zero_engine.store import LocalStore


async def _line(api: Api, job_id: str, **query: Any) -> dict[str, Any]:
    answer = await api.admin.get(f"/v1/jobs/{job_id}/metrics", params=query)
    assert answer.status_code == 200, answer.text
    return dict(next(s for s in answer.json()["series"] if not s["branch"]))


async def _train(api: Api, rank: Rank, first: int, last: int, value: Any = lambda step: step / 7) -> None:
    for start in range(first, last + 1, 1000):
        steps = range(start, min(start + 1000, last + 1))
        await rank.report(api, *(points(step, {"loss": float(value(step))}) for step in steps))


async def _logs(api: Api, job_id: str, **query: Any) -> dict[str, Any]:
    answer = await api.admin.get(f"/v1/jobs/{job_id}/logs", params=query)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def _texts(view: dict[str, Any]) -> list[str]:
    return [line["text"] for line in view["items"]]


# --- charts


async def test_points_move_from_the_tail_into_chunks_and_stay_the_same(api: Api) -> None:
    """After 1,300 points: two chunks, a tail of 276, and raw reading gives each step its value."""
    job = await api.submit(train={"steps": 2000})
    rank = await start_attempt(api.database, job["id"])
    await _train(api, rank, 1, 1300)
    async with api.database.read() as connection:
        sealed = (await connection.execute(select(PointChunk.count).order_by(PointChunk.number))).scalars().all()
        tail = await connection.scalar(select(func.count()).select_from(PointTail))
    assert (sealed, tail) == ([CHUNK_POINTS] * 2, 1300 - 2 * CHUNK_POINTS)
    line = await _line(api, job["id"], width=2000)
    assert [(p["step"], p["value"]) for p in line["points"]] == [(s, s / 7) for s in range(1, 1301)]
    assert (line["steps_per_point"], line["count"]) == (1, 1300)


async def test_rollups_are_the_points_rolled_up(api: Api) -> None:
    """Every stored bucket of every level equals the one computed from the raw points, late and repeated steps too."""
    job = await api.submit(train={"steps": 5000})
    rank = await start_attempt(api.database, job["id"])
    await _train(api, rank, 1, 1100)
    await _train(api, rank, 500, 1040, lambda step: -step)  # steps that are sealed already, said again
    await _train(api, rank, 1101, 2600)
    async with api.database.read() as connection:
        (ref,) = await series.refs(connection, job["id"])
        sealed_to = await connection.scalar(select(func.max(PointChunk.last_step)))
        raw = await chunks.read(connection, ref.id, 0, 10**6)
        tail = set((await connection.execute(select(PointTail.step))).scalars())
        for level in (1, 2, 3):
            stored = await chunks.buckets_between(connection, ref.id, level, 0, 10**6)
            inside = ~np.isin(raw.steps, sorted(tail)) & (raw.steps <= sealed_to)
            expected = roll_up(type(raw)(raw.steps[inside], raw.at_us[inside], raw.values[inside]), level)
            for name in COLUMNS:
                np.testing.assert_allclose(getattr(stored, name), getattr(expected, name), err_msg=f"{level} {name}")
    assert raw.values[raw.steps == 700] == -700 and len(raw) == 2600


async def test_a_long_run_is_drawn_from_rollups_and_a_zoom_shows_raw_points(api: Api) -> None:
    """20,000 steps at width 100: few entries are read, no extreme is lost; zoomed to 200 steps: all 200."""
    job = await api.submit(train={"steps": 20_000})
    rank = await start_attempt(api.database, job["id"])
    await _train(api, rank, 1, 20_000, lambda step: 0.0 if step == 12_345 else 1.0 + step % 3)
    line = await _line(api, job["id"], width=100)
    assert line["steps_per_point"] == 256
    assert len(line["points"]) <= 102 and line["count"] == 20_000
    assert min(p["min"] for p in line["points"]) == 0.0 and max(p["max"] for p in line["points"]) == 3.0
    assert line["points"][-1]["step"] == 20_000
    zoomed = await _line(api, job["id"], width=400, from_step=12_300, to_step=12_499)
    assert [p["step"] for p in zoomed["points"]] == list(range(12_300, 12_500))
    assert zoomed["points"][45]["value"] == 0.0


async def test_steps_out_of_order_are_kept_counted_and_drawn_in_order(api: Api) -> None:
    """A huge step first, then smaller ones: all are there."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    await rank.points(api, {607_500: {"loss": 1.0}})
    await rank.points(api, {583_600: {"loss": 2.0}, 583_700: {"loss": 3.0}})
    line = await _line(api, job["id"])
    assert [(p["step"], p["value"]) for p in line["points"]] == [(583_600, 2.0), (583_700, 3.0), (607_500, 1.0)]
    (stats,) = (await api.admin.get(f"/v1/jobs/{job['id']}/metrics/names")).json()["series"]
    assert (stats["out_of_order_count"], stats["count"], stats["last_step"], stats["last"]) == (2, 3, 607_500, 1.0)


async def test_a_resumed_run_is_one_line_with_the_given_up_part_as_a_branch(api: Api) -> None:
    """Attempt 1 to step 12, attempt 2 from 9: the line takes attempt 2 from 9 on; attempt=1 shows the old one whole."""
    job = await api.submit()
    first = await start_attempt(api.database, job["id"])
    await first.points(api, {step: {"loss": 1.0} for step in range(1, 13)})
    async with api.database.write() as tx:
        await jobs.transition(tx, job["id"], Status.QUEUED, actor="controller", reason="retrying")
    second = await start_attempt(api.database, job["id"])
    await second.points(api, {step: {"loss": 2.0} for step in range(9, 16)})
    shown = (await api.admin.get(f"/v1/jobs/{job['id']}/metrics")).json()["series"]
    line, branch = shown
    assert [p["value"] for p in line["points"]] == [1.0] * 8 + [2.0] * 7
    assert [p["step"] for p in branch["points"]] == [9, 10, 11, 12] and branch["attempt"] == 1
    alone = await _line(api, job["id"], attempt=1)
    assert len(alone["points"]) == 12


async def test_one_damaged_chunk_is_an_error_of_its_series_alone(api: Api) -> None:
    """The other series of the same chart are drawn."""
    job = await api.submit(train={"steps": 2000})
    rank = await start_attempt(api.database, job["id"])
    await rank.report(api, *(points(s, {"loss": 1.0, "lr": 2.0}) for s in range(1, 601)))
    async with api.database.write() as tx:
        found = {ref.name: ref.id for ref in await series.refs(tx.connection, job["id"])}
        await tx.execute(update(PointChunk).where(PointChunk.series_id == found["loss"]).values(points=b"rust"))
    answer = await api.admin.get(f"/v1/jobs/{job['id']}/metrics", params={"names": "loss,lr"})
    loss, lr = answer.json()["series"]
    assert loss["error"] and loss["points"] == []
    assert lr["error"] is None and len(lr["points"]) == 600


async def test_a_batch_larger_than_a_chunk_and_a_fresh_series_start_at_any_step(api: Api) -> None:
    """2,000 points at once from step 10**12 on."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    await rank.report(api, *(points(10**12 + s, {"loss": float(s)}) for s in range(2000)))
    line = await _line(api, job["id"], width=4000)
    assert len(line["points"]) == 2000 and line["points"][0]["step"] == 10**12
    async with api.database.read() as connection:
        levels = (await connection.execute(select(Rollup.level).distinct())).scalars().all()
    assert sorted(levels) == [1, 2, 3, 4, 5, 6]


async def test_csv_has_every_raw_point_and_names_no_formula(api: Api) -> None:
    """By `format` and by Accept; a series called like a formula is text to a spreadsheet."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    await rank.points(api, {1: {"loss": 0.1, '=cmd|"x"': 1e300}, 2: {"loss": 0.2}})
    path = f"/v1/jobs/{job['id']}/metrics"
    answers = [
        await api.admin.get(path, params={"format": "csv"}),
        await api.admin.get(path, headers={"Accept": "text/csv"}),
    ]
    for answer in answers:
        rows = list(csv.reader(io.StringIO(answer.text)))
        assert rows[0] == ["name", "rank", "attempt", "step", "at", "value"]
        assert {(r[0], r[3], r[5]) for r in rows[1:]} == {
            ("loss", "1", "0.1"),
            ("loss", "2", "0.2"),
            ('\'=cmd|"x"', "1", "1e+300"),
        }


def test_the_finest_level_that_fits_is_read() -> None:
    """Few points are read raw however far apart they lie; many are read at the level where few buckets are left."""
    sparse, dense = Extent(300, 299_001), Extent(1_000_000, 1_000_000)
    assert metrics.level_for([sparse], 6400) == 0
    assert metrics.level_for([dense], 6400) == 2
    assert metrics.level_for([dense, dense], 6400) == 3
    assert metrics.level_for([], 10) == 0


def test_segments_cover_each_step_once() -> None:
    """The cut between attempts, alone: three attempts, each beginning inside the one before."""
    refs = [series.SeriesRef(n, n, 0, "loss") for n in (1, 2, 3)]
    lines = metrics.lines_of(refs, {1: 1, 2: 50, 3: 30}, 0, 100)
    kept = [(s.ref.attempt, s.first, s.last) for s in lines[0].segments]
    assert kept == [(1, 0, 29), (2, 0, 29), (3, 0, 100)]
    assert [(line.attempt, line.segments[0].first) for line in lines[1:]] == [(2, 30), (1, 30)]


# --- logs


async def test_a_tail_of_any_length_is_exact_and_following_misses_nothing(api: Api) -> None:
    """0, 1, n and more lines than there are; then what comes after the last one seen."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    assert (await _logs(api, job["id"]))["items"] == []
    await rank.report(api, log("".join(f"line {i}\n" for i in range(1, 1201))))
    for limit in (0, 1, 499, 1200, 5000):
        view = await _logs(api, job["id"], limit=limit)
        assert _texts(view) == [f"line {i}" for i in range(1, 1201)][max(0, 1200 - limit) :]
        assert view["next_after"] == 1200
    seen = 1200
    await rank.report(api, log("one more\n"), log("and"))
    view = await _logs(api, job["id"], after=seen)
    assert _texts(view) == ["one more", "and"] and view["items"][1]["open"]
    await rank.report(api, log(" another\n"))
    assert _texts(await _logs(api, job["id"], after=view["next_after"])) == ["and another"]


async def test_paging_back_reaches_the_beginning_and_every_line_once(api: Api) -> None:
    """before= walks from the end to the start."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    for start in range(0, 300, 10):
        await rank.report(api, log("".join(f"{i}\n" for i in range(start, start + 10))))
    lines: list[str] = []
    before: int | None = None
    while True:
        view = await _logs(api, job["id"], limit=37, **({} if before is None else {"before": before}))
        lines = _texts(view) + lines
        before = view["next_before"]
        if before is None:
            break
    assert lines == [str(i) for i in range(300)]


async def test_ranks_are_merged_by_time_and_filtered_by_rank(api: Api) -> None:
    """What rank 1 said earlier stands earlier although it came later."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    other = rank.peer(1)
    await rank.report(api, log("a\n", step=1), log("c\n", step=3))
    await other.report(api, log("b\n", step=2), log("d\n", stream="stderr", step=4))
    view = await _logs(api, job["id"])
    assert _texts(view) == ["a", "b", "c", "d"]
    assert [(line["rank"], line["stream"]) for line in view["items"]][3] == (1, "stderr")
    assert _texts(await _logs(api, job["id"], rank=0)) == ["a", "c"]


async def test_a_search_finds_lines_in_any_script_and_treats_wildcards_as_text(api: Api) -> None:
    """Case does not matter; % and _ are characters."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    await rank.report(api, log("Größe 100%\nGRÖSSE\nplain\n学習 OK\n50_50\n"))
    for text, found in (
        ("größe", ["Größe 100%", "GRÖSSE"]),
        ("PLAIN", ["plain"]),
        ("学習", ["学習 OK"]),
        ("100%", ["Größe 100%"]),
        ("0_5", ["50_50"]),
        ("%", ["Größe 100%"]),
    ):
        assert _texts(await _logs(api, job["id"], q=text)) == found, text


async def test_a_progress_bar_is_one_line_that_changes(api: Api) -> None:
    """While it runs, the open line; when it ends, one finished line."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    await rank.report(api, log("\r 10%|#  |\r 20%"), log("|## |"))
    view = await _logs(api, job["id"])
    assert [(line["text"], line["open"]) for line in view["items"]] == [(" 20%|## |", True)]
    await rank.report(api, log("\r\x1b[32m100%\x1b[0m\n"), closed=True)
    assert [(line["text"], line["open"]) for line in (await _logs(api, job["id"]))["items"]] == [("100%", False)]


async def test_the_last_line_without_an_end_is_kept_when_the_rank_ends(api: Api) -> None:
    """`closed` finishes it."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    await rank.report(api, log("Traceback: oops"), closed=True)
    view = await _logs(api, job["id"])
    assert [(line["text"], line["open"]) for line in view["items"]] == [("Traceback: oops", False)]


async def test_a_chatty_job_keeps_its_head_and_tail_and_says_how_much_is_gone(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cap holds; the first and the last lines are there; the download has the same lines."""
    monkeypatch.setattr(logs, "CHUNK_LINES", 10)
    object.__setattr__(api.settings, "log_bytes_per_attempt", 4000)
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    for start in range(0, 2000, 100):
        await rank.report(api, log("".join(f"line {i:06d}\n" for i in range(start, start + 100))))
    view = await _logs(api, job["id"], limit=5000)
    kept = _texts(view)
    assert kept[0] == "line 000000" and kept[-1] == "line 001999"
    assert sum(len(text) + 1 for text in kept) <= 4000
    assert view["dropped_bytes"] == 2000 * 12 - sum(len(text) + 1 for text in kept)
    text = (await api.admin.get(f"/v1/jobs/{job['id']}/logs/text")).text
    assert text.splitlines() == kept


async def test_markup_in_a_log_is_served_as_text(api: Api) -> None:
    """JSON by content type, and never sniffed."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    await rank.report(api, log("<img src=x onerror=alert(1)>\n"))
    assert _texts(await _logs(api, job["id"])) == ["<img src=x onerror=alert(1)>"]
    download = await api.admin.get(f"/v1/jobs/{job['id']}/logs/text")
    assert download.headers["content-type"].startswith("text/plain")
    assert download.headers["x-content-type-options"] == "nosniff"


# --- checkpoints


async def _published(api: Api) -> tuple[dict[str, Any], ByHand]:
    """A job with a real checkpoint of step 5 in the store, known to the server."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    made = ByHand(LocalStore(api.settings.job_store(job["id"])), step=5)
    manifest = made.publish()
    shards = [
        {"rank": i, "file": s.file, "bytes": made.store.size(f"{made.folder}/{s.file}"), "checksum": s.checksum}
        for i, s in enumerate(manifest.shards)
    ]
    await rank.report(api, {**checkpoint(5), "folder": made.folder, "shards": shards})
    return job, made


async def _checkpoint(api: Api, job_id: str) -> dict[str, Any]:
    (found,) = (await api.admin.get(f"/v1/jobs/{job_id}/checkpoints")).json()["items"]
    return dict(found)


async def test_a_long_list_of_checkpoints_is_read_in_pages_and_has_removed_ones_on_request(api: Api) -> None:
    """Each once, newest step first and of one step the newest attempt first; counts stay those of the job."""
    job = await api.submit()
    made = [(step, 1) for step in range(1, 70)] + [(step, 2) for step in range(60, 70)]
    async with api.database.write() as tx:
        for step, attempt in made:
            record = CheckpointRecord.model_validate(checkpoint(step, fence=attempt))
            added = await checkpoints.record(tx, job["id"], attempt, record)
            if added and step < 50:
                await checkpoints.set_status(tx, added, "deleted")
    existing, pages = await _pages(api, job["id"], limit=12)
    assert existing == sorted((each for each in made if each[0] >= 50), reverse=True) and len(pages) == 3
    assert all(page["counts"] == {"complete": 30, "deleted": 49} for page in pages)
    everything, _ = await _pages(api, job["id"], limit=30, removed=True)
    assert everything == sorted(made, reverse=True)
    path = f"/v1/jobs/{job['id']}/checkpoints"
    for strange in (write_cursor("-created_at", [1, 1]), write_cursor("-step,-attempt", ["x", 1]), "%"):
        assert (await api.admin.get(path, params={"cursor": strange})).status_code == 422


async def _pages(api: Api, job_id: str, **query: Any) -> tuple[list[tuple[int, int]], list[dict[str, Any]]]:
    """Step and attempt of every checkpoint listed, and the pages they stood on."""
    pages: list[dict[str, Any]] = []
    while not pages or pages[-1]["next_cursor"]:
        cursor = {"cursor": pages[-1]["next_cursor"]} if pages else {}
        pages.append((await api.admin.get(f"/v1/jobs/{job_id}/checkpoints", params={**query, **cursor})).json())
    return [(item["step"], item["attempt"]) for page in pages for item in page["items"]], pages


async def test_verifying_reads_every_byte_and_marks_what_it_finds(api: Api) -> None:
    """Whole: verified. One changed byte: corrupt, the file named, an event, and it is no longer what a resume takes."""
    job, made = await _published(api)
    path = f"/v1/checkpoints/{(await _checkpoint(api, job['id']))['id']}"
    whole = (await api.admin.post(f"{path}/verify")).json()
    assert (whole["ok"], whole["problems"], whole["checkpoint"]["status"]) == (True, [], "verified")
    folder = Path(api.settings.job_store(job["id"]))
    elsewhere = folder.rename(folder.with_name("elsewhere"))
    away = [await api.admin.post(f"{path}/verify"), await api.admin.get(f"{path}/export")]
    assert {(answer.status_code, answer.json()["code"]) for answer in away} == {(503, "store_unavailable")}
    assert (await _checkpoint(api, job["id"]))["status"] == "verified", "a store that is not mounted says nothing"
    elsewhere.rename(folder)
    file = folder / made.folder / whole["checkpoint"]["shards"][1]["file"]
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    broken = (await api.admin.post(f"{path}/verify")).json()
    assert (broken["ok"], broken["checkpoint"]["status"]) == (False, "corrupt")
    assert file.name in broken["problems"][0]
    assert [shard["status"] for shard in broken["checkpoint"]["shards"]] == ["ok", "corrupt"]
    events = (await api.admin.get(f"/v1/jobs/{job['id']}/events")).json()["items"]
    assert events[0]["action"] == "checkpoint.corrupt"
    async with api.database.read() as connection:
        assert await checkpoints.resume_point(connection, job["id"]) is None


async def test_verifying_what_was_deleted_by_hand_says_that_it_is_gone(api: Api) -> None:
    """It was finished once: its shards are missing, not whole, and not `never finished`; files that come back are."""
    job, made = await _published(api)
    path = f"/v1/checkpoints/{(await _checkpoint(api, job['id']))['id']}"
    folder = Path(api.settings.job_store(job["id"]))
    (folder / "job.json").write_text("{}")  # the store is there
    kept = (folder / made.folder).rename(folder.with_name("kept"))
    gone = (await api.admin.post(f"{path}/verify")).json()
    assert (gone["ok"], gone["problems"], gone["checkpoint"]["status"]) == (False, [GONE], "corrupt")
    assert [shard["status"] for shard in gone["checkpoint"]["shards"]] == ["missing"] * 2
    assert gone["checkpoint"]["bad_ranks"] == [0, 1]
    kept.rename(folder / made.folder)
    back = (await api.admin.post(f"{path}/verify")).json()
    assert (back["ok"], [shard["status"] for shard in back["checkpoint"]["shards"]]) == (True, ["ok"] * 2)


async def test_an_export_is_one_safetensors_file_of_announced_length(api: Api) -> None:
    """Canonical names, each tied tensor once, the exact bytes; bf16 on request; 404 for what is not there."""
    job, _ = await _published(api)
    path = f"/v1/checkpoints/{(await _checkpoint(api, job['id']))['id']}/export"
    answer = await api.admin.get(path)
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert "content-encoding" not in answer.headers
    tensors = load(answer.content)
    assert {"embed.weight", "blocks.0.bias", "scale", "nothing", "norm.mean"} <= set(tensors)
    assert "head.weight" not in tensors and tensors["embed.weight"].shape == (40, 10)
    tar = await api.admin.get(path, params={"format": "folder"})
    assert int(tar.headers["content-length"]) == len(tar.content) and tar.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(tar.content)) as unpacked:
        assert unpacked.getnames() == ["config.json", "model.safetensors"]
        inside = unpacked.extractfile("model.safetensors")
        assert inside is not None and inside.read() == answer.content
    refused = await api.admin.get(path, params={"format": "transformers"})
    assert (refused.status_code, refused.json()["code"]) == (422, "export_refused")
    half = await api.admin.get(path, params={"dtype": "bf16"})
    assert len(half.content) < len(answer.content)
    assert (await api.admin.get(f"/v1/checkpoints/{new_id()}/export")).status_code == 404
    assert (await api.admin.get("/v1/checkpoints/..%2f..%2fetc/export")).status_code == 404


async def test_exporting_what_is_damaged_or_gone_is_refused_by_name(api: Api) -> None:
    """Without a manifest there is no checkpoint: 409, and the reason says which folder."""
    job, made = await _published(api)
    path = f"/v1/checkpoints/{(await _checkpoint(api, job['id']))['id']}/export"
    made.store.delete(f"{made.folder}/manifest.json")
    answer = await api.admin.get(path)
    assert (answer.status_code, answer.json()["code"]) == (409, "checkpoint_unreadable")
    assert made.folder in answer.json()["detail"]
