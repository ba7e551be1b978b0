"""`verify` and `verify-resume` as typed: what they read, whom they ask, how they exit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer

from server.cli import verify_commands
from tests.unit.checkpoint_by_hand import ByHand
from tests.unit.scripted_server import Answer, Script, job_view, serving
from tests.unit.test_cli_commands import JOB, shardyard
from workers.verify_resume import CannotVerifyError, choose
from zero_engine.shard import MANIFEST
from zero_engine.store import LocalStore

CHECKPOINT = "019a0000-0000-7000-8000-00000000c0de"
SPEC = {"name": "x", "train": {"steps": 5}}
VIEW: dict[str, Any] = {
    "id": CHECKPOINT,
    "step": 5,
    "attempt": 1,
    "status": "corrupt",
    "bytes": 36492,
    "bad_ranks": [1],
}


@pytest.fixture
def script() -> Iterator[Script]:
    """A server with one job and one checkpoint of it."""
    page: dict[str, Any] = {"items": [job_view()], "next_cursor": None, "counts": {}}
    job = {**job_view(), "spec": SPEC}
    answers: dict[str, Any] = {"GET /v1/jobs": Answer(page), f"GET /v1/jobs/{JOB}": Answer(job)}
    answers[f"GET /v1/jobs/{JOB}/checkpoints"] = Answer({"items": [VIEW], "next_cursor": None})
    with serving(Script(answers)) as script:
        yield script


def test_a_folder_is_verified_without_a_server(tmp_path: Path) -> None:
    """Whole: exit code 0; damaged: 1, with every bad rank and block."""
    manifest = ByHand(LocalStore(tmp_path)).publish()
    good = shardyard(None, "verify", str(tmp_path / manifest.folder))
    assert good.returncode == 0 and json.loads(good.stdout)["bytes"] == manifest.total_bytes
    shard = manifest.shards[1]
    path = tmp_path / manifest.folder / shard.file
    data = bytearray(path.read_bytes())
    data[shard.segments[0].offset] ^= 1
    path.write_bytes(data)
    bad = shardyard(None, "verify", str(tmp_path / manifest.folder))
    found = json.loads(bad.stdout)
    assert bad.returncode == 1 and found["bad_ranks"] == [1]
    assert found["damage"][0]["blocks"] == [shard.segments[0].first]


@pytest.mark.parametrize("words", [[CHECKPOINT], ["latest"], ["latest@5"], ["latest@c0de"]])
def test_a_checkpoint_of_a_server_is_verified_by_the_server(script: Script, words: list[str]) -> None:
    """By its id, its job, its step or the end of its id; the server's word decides the exit code."""
    answer = {"ok": False, "problems": ["rank-00001 is missing"], "checkpoint": VIEW}
    script.answers |= {
        f"GET /v1/checkpoints/{CHECKPOINT}": Answer(VIEW),
        f"POST /v1/checkpoints/{CHECKPOINT}/verify": Answer(answer),
    }
    ended = shardyard(script, "verify", *words)
    assert ended.returncode == 1 and json.loads(ended.stdout)["bad_ranks"] == [1]


def test_a_job_is_run_again_with_what_the_server_recorded(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program gets the job's spec, its store as the server has it, and each loss and norm to the last bit."""
    text = (
        'name,rank,attempt,step,at,value\r\n"loss",0,1,1,t,0.1\r\n"grad_norm",0,1,1,t,1e-320\r\n"loss",0,1,2,t,NaN\r\n'
    )
    script.answers[f"GET /v1/jobs/{JOB}/metrics"] = Answer(text.encode(), content_type="text/csv")
    seen: dict[str, Any] = {}

    def become(arguments: list[str]) -> NoReturn:
        seen["spec"] = json.loads(Path(arguments[0]).read_text())
        seen["recorded"] = json.loads(Path(arguments[4]).read_text())
        seen["rest"] = [arguments[2], *arguments[5:]]
        raise typer.Exit(1)

    monkeypatch.setattr(verify_commands, "_become", become)
    script.answers["GET /v1/store"] = Answer({"url": "s3://of/server"})
    assert shardyard(script, "verify-resume", JOB).returncode == 1
    assert seen["rest"][0] == f"s3://of/server/{JOB}"
    ended = shardyard(script, "verify-resume", JOB, "--steps", "3", "--ranks", "1", "--checkpoints", "s3://bucket/x/")
    assert ended.returncode == 1
    assert seen["spec"] == SPEC and seen["recorded"]["1"] == {"loss": 0.1, "grad_norm": 1e-320}
    assert str(seen["recorded"]["2"]["loss"]) == "nan"
    assert seen["rest"][:5] == [f"s3://bucket/x/{JOB}", "--steps", "3", "--set", "resources.ranks=1"]


def test_a_place_that_is_no_checkpoint_is_named_whole(tmp_path: Path) -> None:
    """A typo, a store in place of a checkpoint in it, a folder whose manifest is gone."""
    manifest = ByHand(LocalStore(tmp_path / "store")).publish()
    typo = shardyard(None, "verify", f"{tmp_path}/savero/step")
    assert typo.returncode == 2 and f"{tmp_path}/savero/step is no folder" in typo.stderr
    store = shardyard(None, "verify", f"{tmp_path}/store/")
    assert store.returncode == 2 and f"name one, as {tmp_path}/store/{manifest.folder}" in store.stderr
    (tmp_path / "store" / manifest.folder / MANIFEST).unlink()
    gone = shardyard(None, "verify", str(tmp_path / "store" / manifest.folder))
    assert gone.returncode == 1 and json.loads(gone.stdout)["place"] == str(tmp_path / "store" / manifest.folder)


def test_a_spec_file_needs_its_checkpoints_named(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("name: x\n")
    ended = shardyard(None, "verify-resume", str(tmp_path / "spec.yaml"))
    assert ended.returncode == 2 and "--checkpoints" in ended.stderr


def test_the_checkpoint_to_start_from_is_named_by_its_folder_or_by_a_path_to_it(tmp_path: Path) -> None:
    """Both give the same rerun; a name that is not there is answered with those that are."""
    older, newer = (ByHand(LocalStore(tmp_path), step=step) for step in (10, 20))
    older.publish()
    newer.publish()
    chosen = [choose(str(tmp_path), start, None, {}) for start in (older.folder, f"{tmp_path / older.folder}/")]
    assert chosen[0] == chosen[1] and (chosen[0].first, chosen[0].until) == (10, 20)
    with pytest.raises(CannotVerifyError, match=f"no checkpoint other in .*{older.folder}, {newer.folder}"):
        choose(str(tmp_path), "somewhere/other", None, {})


def test_a_store_without_any_checkpoint_is_said_to_be_the_wrong_place(tmp_path: Path) -> None:
    """Not that the job keeps too few: its checkpoints lie in another store."""
    with pytest.raises(CannotVerifyError, match=f"no checkpoint in {tmp_path}; say with --checkpoints"):
        choose(str(tmp_path), None, None, {})
