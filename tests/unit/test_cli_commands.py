"""Commands as typed: what they ask the server, what they print, and how they exit."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from server.cli import main
from server.cli.checkpoint_commands import _draw
from server.cli.connection import Session
from server.cli.follow import _numbers
from server.cli.jobs_commands import _draw_jobs, _plan, _saving
from server.cli.output import Output, counted_in
from tests.unit.scripted_server import Answer, Asked, Script, job_view, serving
from tests.waiting import PATIENCE_SECONDS

JOB = job_view()["id"]
SPEC = "name: tiny\nmodel: {kind: mlp}\ndata: {kind: digits}\ntrain: {steps: 5}\n"
FEED = Answer(b"data: {}\n\n", content_type="text/event-stream")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def script() -> Iterator[Script]:
    """A server with one running job."""
    page = {"items": [job_view()], "next_cursor": None, "counts": {}}
    with serving(Script({"GET /v1/jobs": Answer(page), f"GET /v1/jobs/{JOB}": Answer(job_view())})) as script:
        yield script


def shardyard(script: Script | None, *words: str, stdin: str = "", cwd: Path | None = None) -> Ended:
    """The command as the console script runs it, stdout and stderr no terminals."""
    where = [] if script is None else ["--server", script.url, "--token", "t"]
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["shardyard", *words, *where])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        if cwd is not None:
            patch.chdir(cwd)
        with pytest.raises(SystemExit) as ended:
            main()
    return Ended(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def test_the_console_script_runs_as_a_process_of_its_own(script: Script) -> None:
    """The other tests call the same function in this one."""
    command = [Path(sys.executable).with_name("shardyard"), "jobs", "--server", script.url, "--token", "t"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert run.returncode == 0 and json.loads(run.stdout)[0]["id"] == JOB


def test_a_piped_table_is_json(script: Script) -> None:
    run = shardyard(script, "jobs", "--status", "running", "--status", "queued")
    assert run.returncode == 0 and json.loads(run.stdout)[0]["id"] == JOB
    assert script.asked[0].query["status"] == "running,queued"


@pytest.mark.parametrize("named", [JOB, "deadbeef", "beef", "gpt", "latest"])
def test_a_job_is_named_by_id_end_of_id_name_or_latest(script: Script, named: str) -> None:
    script.answers[f"POST /v1/jobs/{JOB}/cancel"] = Answer(job_view(status="stopping"))
    run = shardyard(script, "cancel", named)
    assert run.returncode == 0 and json.loads(run.stdout)[0]["status"] == "stopping"


def test_a_person_is_shown_the_save_that_runs_now() -> None:
    """A row of `show` while there is one, and none otherwise."""
    saving = {"step": 40, "since": "2026-01-01T00:00:00+00:00"}
    ((name, text),) = _saving(job_view(current_attempt={"saving": saving}))
    assert name == "Saving" and text.startswith("step 40, for ")
    assert [_saving(job_view(current_attempt=idle)) for idle in ({"saving": None}, None)] == [[], []]


def test_a_rate_is_counted_in_what_the_data_are() -> None:
    """Images are samples; the progress line and `show` ask the same."""
    images = job_view(spec={"data": {"kind": "digits"}})
    assert [counted_in(job) for job in (images, job_view())] == ["samples", "tokens"]
    assert "1,000 samples/s" in _numbers(images) and "1,000 tokens/s" in _numbers(job_view())


def test_a_person_is_shown_the_plan_of_a_job_or_how_far_it_is() -> None:
    """At the stage that the job has, else at the one that is advised."""
    stages = [{"total_bytes": 4096 >> n, "total_traffic_bytes": 2048, "fits": n > 0} for n in range(4)]
    made = {"predicted": {"stages": stages, "advised_stage": 1}, "predicted_seconds": None, "status": "done"}
    assert _plan({**made, "stage": None}) == "2 KiB a rank, 2 KiB sent a step"
    assert _plan({**made, "stage": 0}).endswith("; it does not fit the device")
    assert ", 1.5 s a step" in _plan({**made, "stage": 2, "predicted_seconds": 1.5})
    none = {"predicted": None, "failure": None}
    assert _plan({**none, "status": "pending"}).startswith("being made")
    failed = {**none, "status": "failed", "failure": "Traceback\n  a line\nValueError: no such width\n"}
    assert (_plan(failed), _plan({**none, "status": None})) == ("cannot be made: ValueError: no such width", "-")


def test_a_name_that_fits_several_jobs_is_bad_input_and_cancels_none(script: Script) -> None:
    """Cancelling the wrong job is worse than asking again."""
    other = job_view(id=JOB[:-8] + "00000001")
    script.answers["GET /v1/jobs"] = Answer({"items": [job_view(), other], "next_cursor": None})
    run = shardyard(script, "cancel", "gpt")
    assert run.returncode == 2 and "deadbeef" in run.stderr and "00000001" in run.stderr
    assert all(asked.method == "GET" for asked in script.asked)


def test_submit_sends_the_whole_spec_with_absolute_paths_and_an_idempotency_key(script: Script, tmp_path: Path) -> None:
    """Relative paths mean the folder of the spec; the server has another working folder."""
    (tmp_path / "spec.yaml").write_text(
        "name: t\nmodel: {kind: gpt}\ndata: {kind: text, path: corpus}\ntrain: {steps: 5}\n"
    )
    script.answers["POST /v1/jobs"] = lambda asked: Answer(job_view(name=asked.body["name"]))
    run = shardyard(script, "submit", str(tmp_path / "spec.yaml"), "--set", "train.steps=7")
    assert run.returncode == 0, run.stderr
    (asked,) = script.asked
    assert asked.body["data"]["path"] == str(tmp_path / "corpus") and asked.body["train"]["steps"] == 7
    assert len({name.lower(): value for name, value in asked.headers.items()}["idempotency-key"]) >= 16


def test_submit_reads_a_spec_from_stdin(script: Script) -> None:
    script.answers["POST /v1/jobs"] = lambda asked: Answer(job_view(name=asked.body["name"]))
    run = shardyard(script, "submit", "-", stdin=SPEC)
    assert run.returncode == 0 and json.loads(run.stdout)["name"] == "tiny"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SPEC.replace("steps", "step"), "/train/step"),
        (SPEC.replace("5", "five"), "/train/steps"),
        ("name: [", "line 1"),
        ("", "spec.yaml"),
    ],
)
def test_a_faulty_spec_is_exit_code_2_with_the_place_and_sends_nothing(
    script: Script, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "spec.yaml").write_text(text)
    run = shardyard(script, "submit", "spec.yaml", cwd=tmp_path)
    assert run.returncode == 2 and said in run.stderr and "Traceback" not in run.stderr
    assert not script.asked


def test_a_spec_that_is_not_there_is_exit_code_2(script: Script, tmp_path: Path) -> None:
    run = shardyard(script, "submit", str(tmp_path / "none.yaml"))
    assert run.returncode == 2 and "none.yaml cannot be read" in run.stderr


def test_a_refusal_of_the_server_is_printed_field_by_field(script: Script) -> None:
    fault = {"pointer": "/resources/ranks", "message": "ranks 99 is above the limit of 16", "suggestion": "16"}
    body = {"status": 422, "detail": "1 problem", "code": "invalid_spec", "errors": [fault]}
    script.answers["POST /v1/jobs"] = Answer(body, 422)
    run = shardyard(script, "submit", "-", stdin=SPEC)
    assert run.returncode == 2 and "/resources/ranks: ranks 99 is above the limit of 16" in run.stderr


def test_an_impossible_action_says_the_possible_ones(script: Script) -> None:
    body = {"status": 409, "detail": "A queued job cannot be resumed.", "allowed_actions": ["cancel", "pause"]}
    script.answers[f"POST /v1/jobs/{JOB}/resume"] = Answer(body, 409)
    run = shardyard(script, "resume", JOB)
    assert run.returncode == 1 and "possible now: cancel, pause" in run.stderr


def test_a_refusal_for_one_of_several_jobs_leaves_none_of_the_others_out(script: Script) -> None:
    """Those before and after it are done and shown; the one that was refused is named, and the exit code says so."""
    other = JOB[:-8] + "00000001"
    script.answers["GET /v1/jobs"] = Answer({"items": [job_view(), job_view(id=other)], "next_cursor": None})
    refusal = {"status": 409, "detail": "The job has ended.", "allowed_actions": ["delete"]}
    script.answers[f"POST /v1/jobs/{JOB}/cancel"] = Answer(refusal, 409)
    script.answers[f"POST /v1/jobs/{other}/cancel"] = Answer(job_view(id=other, status="stopping"))
    run = shardyard(script, "cancel", JOB, other)
    assert run.returncode == 1 and [job["id"] for job in json.loads(run.stdout)] == [other]
    assert run.stderr.splitlines() == ["deadbeef: The job has ended.", "deadbeef:   possible now: delete"]


def test_delete_waits_until_the_server_knows_the_job_no_more(script: Script) -> None:
    """What cannot be removed is exit code 1, with the job's reason."""
    script.answers |= {f"DELETE /v1/jobs/{JOB}": Answer(job_view(status="deleting"), 202), "GET /v1/feed": FEED}
    assert json.loads(shardyard(script, "delete", "latest").stdout)[0]["status"] == "deleting"
    views = iter([Answer(job_view(status="deleting")), Answer({"status": 404, "detail": "gone"}, 404)])
    script.answers[f"GET /v1/jobs/{JOB}"] = lambda _: next(views)
    gone = shardyard(script, "delete", JOB, "--wait")
    assert gone.returncode == 0 and json.loads(gone.stdout)[0]["status"] == "gone"
    script.answers[f"GET /v1/jobs/{JOB}"] = Answer(job_view(status="delete_failed"))
    assert shardyard(script, "delete", JOB, "--wait").returncode == 1


def test_a_filter_that_fits_no_job_does_not_say_that_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    session = cast(Session, SimpleNamespace(output=Output(terminal=True)))
    _draw_jobs(session, [], "running")
    assert "No job is like that" in capsys.readouterr().out
    _draw_jobs(session, [], None)
    assert "shardyard submit" in capsys.readouterr().out


def test_resume_asks_only_for_what_was_typed(script: Script) -> None:
    """An absent field keeps the job's own value."""
    script.answers[f"POST /v1/jobs/{JOB}/resume"] = Answer(job_view(status="queued"))
    shardyard(script, "resume", JOB, "--ranks", "1", "--stage", "3", "--steps", "80")
    assert script.asked[-1].body == {"ranks": 1, "zero": {"stage": 3}, "train": {"steps": 80}}
    shardyard(script, "resume", JOB)
    assert script.asked[-1].body == {}


@pytest.mark.parametrize(("status", "exit_code"), [("succeeded", 0), ("failed", 1), ("cancelled", 1), ("paused", 1)])
def test_watching_ends_with_the_job_and_its_outcome_is_the_exit_code(
    script: Script, status: str, exit_code: int
) -> None:
    """Piped, each change is one JSON object on a line."""
    views = iter([job_view(), job_view(step=9), job_view(status=status, step=10)])
    script.answers["GET /v1/feed"] = FEED
    script.answers[f"GET /v1/jobs/{JOB}"] = lambda _: Answer(next(views))
    run = shardyard(script, "watch", JOB)
    assert run.returncode == exit_code
    assert [json.loads(line)["step"] for line in run.stdout.splitlines()] == [3, 9, 10]


def test_logs_stay_text_when_piped_and_follow_to_the_last_line(script: Script) -> None:
    """The line that was written between the last look and the end is there too."""
    lines = [{"seq": n, "rank": n % 2, "text": f"line {n}\n"} for n in range(5)]
    states = iter(["running", "succeeded", "succeeded"])
    known = 3

    def window(asked: Asked) -> Answer:
        after = int(asked.query["after"]) if "after" in asked.query else -1
        items = [line for line in lines[:known] if line["seq"] > after]
        return Answer({"items": items, "next_before": None, "next_after": items[-1]["seq"] if items else after})

    def state(_: Asked) -> Answer:
        nonlocal known
        known = 5
        return Answer(job_view(status=next(states)))

    script.answers |= {f"GET /v1/jobs/{JOB}/logs": window, f"GET /v1/jobs/{JOB}": state, "GET /v1/feed": FEED}
    run = shardyard(script, "logs", JOB, "-f")
    assert run.stdout.splitlines() == [f"{n % 2}| line {n}" for n in range(5)]


def test_a_line_too_long_is_marked_where_it_goes_on_and_an_empty_log_is_empty(script: Script) -> None:
    """Piped, nothing is invented: no line, no text."""
    items = [{"seq": 1, "rank": 0, "text": "xxx", "split": True}, {"seq": 2, "rank": 0, "text": "yy", "split": False}]
    script.answers[f"GET /v1/jobs/{JOB}/logs"] = Answer({"items": items, "next_before": None, "next_after": 2})
    assert shardyard(script, "logs", JOB).stdout.splitlines() == ["0| xxx ↩", "0| yy"]
    script.answers[f"GET /v1/jobs/{JOB}/logs"] = Answer({"items": [], "next_before": None, "next_after": None})
    assert shardyard(script, "logs", JOB).stdout == ""


def checkpoint(step: int, status: str = "verified") -> dict[str, Any]:
    return {"id": f"c{step}", "step": step, "attempt": 1, "status": status}


def test_a_list_of_checkpoints_says_what_it_leaves_out(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """Page after page until there are as many as asked for; the older ones and the removed ones are counted."""
    pages = {None: ([checkpoint(30), checkpoint(20)], "more"), "more": ([checkpoint(10)], "older")}

    def page(asked: Asked) -> Answer:
        items, following = pages[asked.query.get("cursor")]
        return Answer({"items": items, "next_cursor": following, "counts": {"verified": 4, "deleted": 7}})

    script.answers[f"GET /v1/jobs/{JOB}/checkpoints"] = page
    found = shardyard(script, "checkpoints", JOB, "--limit", "3")
    assert [item["step"] for item in json.loads(found.stdout)] == [30, 20, 10]
    assert script.asked[-1].query == {"limit": "1", "cursor": "more", "removed": "false"}
    session = cast(Session, SimpleNamespace(output=Output(terminal=True)))
    _draw(session, [], {"verified": 4, "deleted": 7}, removed=False)
    assert "4 older ones" in (said := capsys.readouterr().out) and "7 were removed" in said


def test_export_takes_the_newest_usable_checkpoint_and_leaves_no_half_file(script: Script, tmp_path: Path) -> None:
    items = [checkpoint(10), checkpoint(20), checkpoint(30, "corrupt")]
    script.answers |= {
        f"GET /v1/jobs/{JOB}/checkpoints": Answer({"items": items, "next_cursor": None}),
        "GET /v1/checkpoints/c20/export": Answer(b"weights", content_type="application/octet-stream"),
    }
    run = shardyard(script, "export", JOB, "-o", "model.safetensors", cwd=tmp_path)
    assert run.returncode == 0 and (tmp_path / "model.safetensors").read_bytes() == b"weights"
    again = shardyard(script, "export", JOB, "-o", "model.safetensors", cwd=tmp_path)
    assert again.returncode == 2 and "--force" in again.stderr
    script.answers["GET /v1/checkpoints/c20/export"] = Answer({"detail": "gone"}, 404)
    assert "step: 10, 20" in shardyard(script, "export", f"{JOB}@30", "-o", "third.safetensors", cwd=tmp_path).stderr
    failed = shardyard(script, "export", JOB, "-o", "other.safetensors", cwd=tmp_path)
    assert failed.returncode == 1 and [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_export_unpacks_a_folder_that_is_whole_or_not_there(script: Script, tmp_path: Path) -> None:
    """What the server sends as one tar; JOB@STEP names the checkpoint; a foreign name inside is refused."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in (("config.json", b"{}"), ("model.safetensors", b"weights")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    script.answers |= {
        f"GET /v1/jobs/{JOB}/checkpoints": Answer({"items": [checkpoint(10), checkpoint(20)], "next_cursor": None}),
        "GET /v1/checkpoints/c10/export": Answer(packed.getvalue(), content_type="application/x-tar"),
    }
    named = (f"{JOB}@10", "-o", "model", "--format", "transformers", "--dtype", "bf16")
    run = shardyard(script, "export", *named, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": b"weights",
    }
    assert script.asked[-1].query == {"dtype": "bf16", "format": "transformers"}
    script.answers["GET /v1/checkpoints/c10/export"] = Answer(packed.getvalue()[:700], content_type="application/x-tar")
    cut = shardyard(script, "export", f"{JOB}@10", "-o", "half", cwd=tmp_path)
    assert cut.returncode == 1 and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_fork_and_clone_send_what_was_set_as_a_merge_patch(script: Script) -> None:
    """Dotted names become the nested spec, values are read as YAML, a key makes the answer safe to lose."""
    made = job_view(id=JOB, fork_step=10)
    script.answers |= {
        f"GET /v1/jobs/{JOB}/checkpoints": Answer({"items": [{**checkpoint(10), "job_id": JOB}], "next_cursor": None}),
        f"POST /v1/jobs/{JOB}/fork": Answer(made, 201),
        f"POST /v1/jobs/{JOB}/clone": Answer(made, 201),
    }
    run = shardyard(script, "fork", JOB, "--set", "train.optimizer.lr=1e-4", "--set", "zero.stage=3", "--name", "枝")
    assert run.returncode == 0, run.stderr
    asked = script.asked[-1]
    assert asked.body == {
        "checkpoint": "c10",
        "name": "枝",
        "spec": {"train": {"optimizer": {"lr": 1e-4}}, "zero": {"stage": 3}},
    }
    assert asked.headers.get("Idempotency-Key") or asked.headers.get("idempotency-key")
    assert shardyard(script, "clone", JOB, "--set", "train.seed=").returncode == 0
    assert script.asked[-1].body == {"spec": {"train": {"seed": None}}}
    assert shardyard(script, "clone", JOB, "--set", "seed").returncode == 2


def test_without_a_server_every_client_command_says_so_and_exits_1(tmp_path: Path) -> None:
    run = shardyard(None, "jobs", "--data-dir", str(tmp_path))
    assert run.returncode == 1 and "shardyard serve" in run.stderr and "Traceback" not in run.stderr


def test_an_unknown_command_or_option_is_exit_code_2() -> None:
    assert shardyard(None, "sumbit").returncode == 2
    assert shardyard(None, "jobs", "--colour").returncode == 2


def test_token_prints_the_token_alone_so_that_a_shell_can_take_it(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    assert shardyard(None, "token", "--data-dir", str(tmp_path)).stdout == "abc\n"
    (tmp_path / "port").write_text("8471")
    shown = json.loads(shardyard(None, "token", "--data-dir", str(tmp_path), "--json").stdout)
    assert shown == {"token": "abc", "link": "http://127.0.0.1:8471/login?token=abc"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("node",), "--address"),
        (("node", "--head", "--address", "a:1"), "--address"),
        (("node", "--head"), "RAY_AUTH_TOKEN"),
        (("node", "--head", "--token-file", "/nowhere/token"), "is not there"),
    ],
)
def test_a_machine_joins_a_cluster_only_with_its_secret(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    run = shardyard(None, *words)
    assert run.returncode == 2 and said in run.stderr
