"""`python -m workers.local` as a person uses it: real processes, real gloo ranks, real checkpoints."""

from __future__ import annotations

import io
import json
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from server.exporting import archive
from workers.spec import read_spec_file
from workers.temporary_folder import temporary_folder
from zero_engine.catalog import list_checkpoints, read_manifest
from zero_engine.store import LocalStore

ROOT = Path(__file__).resolve().parents[2]
MLP = """\
name: mlp
model: {kind: mlp, hidden: [16, 12]}
data: {kind: digits}
train:
  steps: 6
  eval: {every: 3, batches: 3}
  optimizer: {kind: adamw, lr: 3.0e-3}
resources: {ranks: 2, device: cpu}
checkpoint: {every: 2}
"""
GPT = """\
name: 世界
model: {kind: gpt, layers: 2, hidden: 32, heads: 2, context: 16, dropout: 0.1}
data: {kind: text, path: text.txt, tokenizer: {kind: bpe, vocab: 300}}
train: {steps: 4, eval: {every: 2, batches: 5}}
resources: {ranks: 2, device: cpu}
"""


@dataclass(frozen=True)
class Run:
    """What a run said."""

    code: int
    steps: list[dict[str, Any]]
    summary: dict[str, Any]
    errors: str


def arguments(file: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "workers.local", str(file), "--data-dir", str(file.parent / "data"), *options]


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    """One process with torch imported that forks a run on request."""
    command = [sys.executable, "-m", "tests.distributed.run_server"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        SERVER.append(process)
        yield
        SERVER.remove(process)
        assert process.stdin is not None
        process.stdin.close()


SERVER: list[subprocess.Popen[str]] = []


def asked(program: str, file: Path, *options: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, JSON lines and standard error of a program."""
    (process,) = SERVER
    assert process.stdin is not None and process.stdout is not None
    output, errors = file.parent / "output", file.parent / "errors"
    words = arguments(file, "--json", *options)[3:]
    request = {"program": program, "arguments": words, "output": str(output), "errors": str(errors)}
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    code = int(process.stdout.readline())
    return code, [json.loads(line) for line in output.read_text().splitlines()], errors.read_text()


def run(file: Path, *options: str) -> Run:
    code, lines, errors = asked("run", file, *options)
    summary = lines.pop()["summary"] if lines and "summary" in lines[-1] else {}
    return Run(code, lines, summary, errors)


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    (tmp_path / "mlp.yaml").write_text(MLP)
    return tmp_path / "mlp.yaml"


@pytest.fixture
def gpt(tmp_path: Path) -> Path:
    words = ("the cat sat on the mat; der Hund läuft; 猫が座る\n", "a b c d e f g h\n", "import os, sys\n")
    (tmp_path / "text.txt").write_text("".join(words[n % 3] * (1 + n % 5) for n in range(300)))
    (tmp_path / "gpt.yaml").write_text(GPT)
    return tmp_path / "gpt.yaml"


def test_it_is_a_program_with_nothing_but_json_on_its_output(mlp: Path) -> None:
    """Property: as a process of its own it says the same as in the forks that the other tests use."""
    options = ("--json", "--set", "train.steps=2")
    alone = subprocess.run(arguments(mlp, *options), cwd=ROOT, capture_output=True, text=True)
    lines = [json.loads(line) for line in alone.stdout.splitlines()]
    assert alone.returncode == 0 and [line.get("step") for line in lines] == [1, 2, None]
    assert lines[-1]["summary"]["digest"] == run(mlp, *options[1:]).summary["digest"]


def test_json_lines_are_one_per_step_and_a_summary(mlp: Path) -> None:
    """Property: the format that scripts rely on: fields, numbers, one line a step, nothing else on standard output."""
    found = run(mlp, "--digest-every", "2")
    assert found.code == 0, found.errors
    assert [line["step"] for line in found.steps] == [1, 2, 3, 4, 5, 6]
    always = ["step", "loss", "grad_norm", "lr", "tokens", "seconds", "bytes_sent", "memory_bytes", "chunk"]
    for line in found.steps:
        assert [key for key in line if key not in ("digest", "eval_loss")] == always
        assert isinstance(line["loss"], float) and isinstance(line["seconds"], float) and line["seconds"] > 0
        assert (line["chunk"], line["tokens"]) == (2, 16)
        assert ("digest" in line) == (line["step"] % 2 == 0)
        assert ("eval_loss" in line) == (line["step"] in (3, 6))
    summary = found.summary
    assert (summary["outcome"], summary["step"], summary["ranks"]) == ("finished", 6, 2)
    assert summary["digest"] == found.steps[-1]["digest"]
    assert summary["eval_loss"] == found.steps[-1]["eval_loss"] and summary["eval_loss_before"] > 0
    assert summary["checkpoints"] == [] and not list(mlp.parent.glob("step-*"))


def test_what_was_measured_is_what_was_planned(mlp: Path) -> None:
    """Property: bytes by category and by purpose equal the plan on every rank, to the byte."""
    for stage in (0, 3):
        found = run(mlp, "--set", f"zero.stage={stage}", "--set", "train.steps=2")
        assert found.summary["memory_bytes"] == found.summary["plan"]["memory_bytes"]
        assert found.summary["ledger_bytes"] == found.summary["plan"]["traffic_bytes"]
        sent = sum(sum(row.values()) for row in found.summary["ledger_bytes"])
        assert found.steps[-1]["bytes_sent"] == sent > 0


def test_ranks_and_stages_do_not_change_a_bit(gpt: Path) -> None:
    """Property: loss, norm, evaluation and digest are equal for 1 to 4 ranks and every stage, with dropout."""
    first = run(gpt, "--ranks", "1", "--set", "zero.stage=0", "--digest-every", "1")
    assert first.code == 0, first.errors
    for ranks, stage in ((2, 1), (2, 2), (3, 3), (4, 0)):
        other = run(gpt, "--ranks", str(ranks), "--set", f"zero.stage={stage}", "--digest-every", "1")
        for mine, theirs in zip(first.steps, other.steps, strict=True):
            for key in ("loss", "grad_norm", "lr", "digest", "eval_loss", "chunk"):
                assert mine.get(key) == theirs.get(key), (ranks, stage, key, mine["step"])
        assert first.summary["eval_loss_before"] == other.summary["eval_loss_before"]


def test_a_resume_on_other_ranks_and_another_stage_is_the_same_run(mlp: Path) -> None:
    """Property: interrupted at step 4 and resumed, the digest is that of the uninterrupted run; keep_latest holds, and
    a save that was killed leaves nothing.
    """
    store = str(mlp.parent / "checkpoints")
    whole = run(mlp)
    begun = run(mlp, "--set", "train.schedule={kind: constant}", "--set", "train.steps=4", "--checkpoints", store)
    assert len(begun.summary["checkpoints"]) == 2
    refused = run(mlp, "--checkpoints", store)
    assert refused.code == 2 and "--resume" in refused.errors
    constant = run(mlp, "--set", "train.schedule={kind: constant}")
    killed = Path(store, "step-0000000005-attempt-000001")
    killed.mkdir()
    (killed / "rank-00000.safetensors").write_bytes(b"half")
    (killed / ".tmp-rank-00001.safetensors-0").write_bytes(b"half")
    elsewhere = ("--ranks", "3", "--set", "zero.stage=3", "--checkpoints", store, "--resume")
    resumed = run(mlp, "--set", "train.schedule={kind: constant}", *elsewhere)
    assert resumed.code == 0, resumed.errors
    assert [line["step"] for line in resumed.steps] == [5, 6]
    assert resumed.summary["digest"] == constant.summary["digest"] != whole.summary["digest"]
    assert resumed.steps[0]["chunk"] == 2  # not ceil(4 / 3) of the resume
    assert len(list(Path(store).glob("step-*"))) == 2 and not killed.exists()
    again = run(mlp, "--set", "train.schedule={kind: constant}", "--checkpoints", store, "--resume")
    assert again.code == 0 and again.steps == [] and again.summary["digest"] == constant.summary["digest"]
    assert again.summary["step"] == 6


def test_a_damaged_checkpoint_is_passed_over_with_a_word(mlp: Path) -> None:
    """Property: the one before is used, and the message names both."""
    store = mlp.parent / "checkpoints"
    run(mlp, "--checkpoints", str(store))
    newest, older = sorted(store.glob("step-*"), reverse=True)
    shard = next(file for file in newest.iterdir() if file.suffix == ".safetensors")
    shard.write_bytes(shard.read_bytes()[:-10])
    resumed = run(mlp, "--checkpoints", str(store), "--resume")
    assert resumed.code == 0, resumed.errors
    assert f"{newest.name} cannot be used" in resumed.errors and f"{older.name} was used" in resumed.errors
    assert [line["step"] for line in resumed.steps] == [5, 6]


def test_other_data_is_refused_on_resume(gpt: Path) -> None:
    """Property: a checkpoint goes on with its own tokens alone, and its tokenizer stands beside it."""
    from tokenizers import Tokenizer

    store = str(gpt.parent / "checkpoints")
    assert run(gpt, "--checkpoints", store).code == 0
    (folder,) = Path(store).glob("step-*")
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == 300
    with (gpt.parent / "text.txt").open("a") as text:
        text.write("one more line\n")
    resumed = run(gpt, "--set", "train.steps=5", "--checkpoints", store, "--resume")
    assert resumed.code == 1 and "was trained on data" in resumed.errors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.step=3", "unknown field"),
        ("zero.stage=7", "must be auto, 0, 1, 2 or 3"),
        ("resources.ranks=9", "ranks 9 is more than the 4 micro-batches"),
        ("data={kind: text, path: missing.txt}", "cannot read data text"),
    ],
)
def test_a_wrong_spec_is_exit_code_two_with_the_field(mlp: Path, change: str, words: str) -> None:
    """Property: nothing starts, standard output stays empty, the message names the field."""
    found = run(mlp, "--set", change)
    assert found.code == 2 and words in found.errors and not found.steps and not found.summary


def test_checkpoints_that_cannot_be_written_are_refused_before_a_step(mlp: Path) -> None:
    """Nobody trains to the end to learn it: the path and the way out are named, and nothing starts."""
    (mlp.parent / "taken").write_text("a file")
    found = run(mlp, "--checkpoints", str(mlp.parent / "taken" / "below"))
    assert found.code == 2 and not found.steps and not found.summary
    assert f"--checkpoints {mlp.parent}/taken/below" in found.errors and "name another place" in found.errors


USER = """
import os
import sys
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.embedding = nn.Embedding(300, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 300)
        self.mode, self.calls = mode, 0
    def forward(self, inputs):
        self.calls += 1
        x = self.embedding(inputs)
        for layer in self.layers:
            x = layer(x)
        if self.mode == "moody":
            x = x * (1 + 0.01 * torch.rand(()) * self.calls)
        if self.calls == 6:
            print("printed by the model")
            if self.mode == "raise" and os.environ.get("FAIL_RANK", "1") == str(torch.distributed.get_rank()):
                raise ValueError("the user's own words")
            if self.mode == "die":
                os.kill(os.getpid(), 9)
            if self.mode == "nan":
                return self.head(x) * float("nan")
        return self.head(x)

def build(mode="run", context=16):
    return Model(mode)
"""


def users(gpt: Path, mode: str, entry: str = "users_own:build") -> tuple[Path, str, str, str, str]:
    """A spec of the user's model, at a stage: an automatic one has it built once more, in another process."""
    (gpt.parent / "code").mkdir(exist_ok=True)
    (gpt.parent / "code" / "users_own.py").write_text(USER)
    kwargs = f"{{mode: {mode}, context: 16}}"
    model = f"model={{kind: python, entry: '{entry}', path: code, kwargs: {kwargs}}}"
    return gpt, "--set", model, "--set", "zero.stage=1"


def test_a_users_model_trains_and_its_output_is_shown(gpt: Path) -> None:
    """Property: the user's module gives the same bits on 1 and 2 ranks; what it prints never meets the JSON lines; why
    its automatic stage was taken is said.
    """
    one = run(*users(gpt, "run"), "--ranks", "1", "--set", "zero.stage=auto")
    two = run(*users(gpt, "run"), "--ranks", "2", "--set", "zero.stage=3")
    assert one.code == two.code == 0, one.errors + two.errors
    assert one.summary["digest"] == two.summary["digest"]
    assert "printed by the model" in one.errors and "one rank sends nothing at any stage" in one.errors


@pytest.mark.parametrize("stage", [0, 3])
def test_an_exception_of_one_rank_ends_all_with_its_traceback(gpt: Path, stage: int) -> None:
    """Property: rank 1 raises; the run fails with rank 1's traceback, not with its peers' broken connection."""
    found = run(*users(gpt, "raise"), "--set", f"zero.stage={stage}")
    assert found.code == 1
    assert "rank 1 failed" in found.errors and "ValueError: the user's own words" in found.errors
    assert found.summary["outcome"] == "failed"


def test_a_rank_that_is_killed_is_named(gpt: Path) -> None:
    """Property: death by a signal is said as such."""
    found = run(*users(gpt, "die"))
    assert found.code == 1 and "killed by SIGKILL" in found.errors


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("users_own:missing", "has no function missing"),
        ("nowhere:build", "ModuleNotFoundError"),
        ("json:dumps", "was found at"),
    ],
)
def test_an_entry_that_gives_no_model_fails_at_the_start(gpt: Path, entry: str, words: str) -> None:
    """Property: the reason is shown, no step is made."""
    found = run(*users(gpt, "run", entry))
    assert found.code == 1 and words in found.errors and not found.steps


def test_ctrl_c_saves_and_leaves_and_the_run_goes_on_later(mlp: Path) -> None:
    """Property: one interrupt ends a run at a step boundary with a checkpoint that a resume goes on from."""
    store = str(mlp.parent / "checkpoints")
    options = ("--set", "train.steps=4000", "--set", "train.eval.every=0", "--set", "train.schedule={kind: constant}")
    process = subprocess.Popen(
        arguments(mlp, "--json", *options, "--set", "checkpoint.every=0", "--checkpoints", store),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()  # the first step is made
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate()
    assert process.returncode == 130, errors
    summary = json.loads(rest.splitlines()[-1])["summary"]
    assert summary["outcome"] == "stopped" and 0 < summary["step"] < 4000
    assert len(summary["checkpoints"]) == 1
    more = summary["step"] + 3
    changed = (*options[2:], "--set", f"train.steps={more}")
    resumed = run(mlp, *changed, "--checkpoints", store, "--resume", "--ranks", "1")
    assert resumed.code == 0 and [line["step"] for line in resumed.steps] == [more - 2, more - 1, more]


def test_nothing_outlives_a_run_that_is_killed(mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Property: kill -9 of the parent takes every rank with it, and the next run the folder that they left."""
    monkeypatch.setenv("TMPDIR", str(mlp.parent))
    monkeypatch.setattr(tempfile, "tempdir", None)
    process = subprocess.Popen(
        arguments(mlp, "--json", "--set", "train.steps=100000", "--set", "checkpoint.every=0"),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(children) == 2
    watched = [os.pidfd_open(pid) for pid in children]
    (left,) = mlp.parent.glob("shardyard-run-*")
    with temporary_folder("shardyard-run-"):
        assert left.is_dir(), "a run that lives lost its folder"
    process.kill()
    process.wait()
    for descriptor in watched:
        assert select.select([descriptor], [], [], 30)[0], "a rank lives on"
        os.close(descriptor)
    process.stdout.close()
    assert left.is_dir()
    with temporary_folder("shardyard-run-") as folder:
        assert list(mlp.parent.glob("shardyard-run-*")) == [folder]
    assert not folder.exists()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_short_floats_give_equal_bits_too(mlp: Path, precision: str) -> None:
    """Property: bf16 or fp16 compute with fp32 masters and sums, on 1 and 2 ranks at stages 0 and 3."""
    options = ("--set", f"train.precision={precision}", "--set", "train.steps=2")
    one = run(mlp, *options, "--ranks", "1", "--set", "zero.stage=0")
    two = run(mlp, *options, "--ranks", "2", "--set", "zero.stage=3")
    assert one.code == two.code == 0, one.errors + two.errors
    assert one.summary["digest"] == two.summary["digest"]
    assert one.summary["memory_bytes"][0]["master"] > 0


def test_recomputed_activations_give_equal_bits(gpt: Path) -> None:
    """Property: none, selective and full activation checkpointing end in the same state, dropout included."""
    policies = ("none", "selective", "full")
    runs = [
        run(gpt, "--set", f"zero.activation_checkpointing={policy}", "--set", "zero.stage=3") for policy in policies
    ]
    assert [found.code for found in runs] == [0, 0, 0], [found.errors for found in runs]
    assert len({found.summary["digest"] for found in runs}) == 1


def test_an_offloaded_update_gives_equal_bits_and_the_planned_bytes(mlp: Path) -> None:
    """Property: masters and moments count as pinned, as planned; the digest is that of a run without offload."""
    options = ("--set", "train.steps=2", "--set", "zero.stage=2")
    plain, offloaded = run(mlp, *options), run(mlp, *options, "--set", "zero.offload=optimizer")
    assert plain.code == offloaded.code == 0, plain.errors + offloaded.errors
    assert plain.summary["digest"] == offloaded.summary["digest"]
    memory = offloaded.summary["memory_bytes"]
    assert memory == offloaded.summary["plan"]["memory_bytes"] and "pinned" not in plain.summary["memory_bytes"][0]
    assert all(row["pinned"] > 0 and row["moments"] == row["master"] == 0 for row in memory)


OPTIMIZERS = {
    "{kind: adam, lr: 3.0e-3, weight_decay: 0.1}": 2,
    "{kind: sgd, lr: 0.1, nesterov: true}": 1,
    "{kind: sgd, lr: 0.1, momentum: 0}": 0,
    "{kind: lion, lr: 1.0e-3}": 1,
}


@pytest.mark.parametrize(("optimizer", "moments"), OPTIMIZERS.items())
def test_every_optimizer_of_a_spec_trains_with_its_planned_state(mlp: Path, optimizer: str, moments: int) -> None:
    """Property: it learns, its states are the planned bytes, and stages 0 and 3 end in the same state."""
    mlp.write_text(MLP.replace("{kind: adamw, lr: 3.0e-3}", optimizer))
    runs = [run(mlp, "--set", f"zero.stage={stage}") for stage in (0, 3)]
    assert [found.code for found in runs] == [0, 0], [found.errors for found in runs]
    whole, sharded = (found.summary for found in runs)
    assert whole["digest"] == sharded["digest"] and runs[0].steps[-1]["loss"] < runs[0].steps[0]["loss"]
    assert all(summary["memory_bytes"] == summary["plan"]["memory_bytes"] for summary in (whole, sharded))
    parameters = whole["memory_bytes"][0]["parameters"]
    assert [row["moments"] for row in whole["memory_bytes"]] == [moments * parameters] * 2


def test_a_self_test_passes_without_a_trace_and_names_a_model_that_is_no_function(gpt: Path) -> None:
    """Property: the bits are those of a run without it; a model with a memory of its own is refused by parameter."""
    plain = run(gpt, "--set", "zero.stage=2")
    tested = run(gpt, "--set", "zero.stage=2", "--set", "zero.self_test=true")
    assert tested.code == 0 and "engine.tested" in tested.errors, tested.errors
    assert plain.summary["digest"] == tested.summary["digest"]
    moody = run(*users(gpt, "moody"), "--set", "zero.stage=1", "--set", "zero.self_test=true")
    assert moody.code == 1 and "self-test" in moody.errors and not moody.steps


def test_a_skipped_step_holds_the_learning_rate_back(gpt: Path) -> None:
    """Property: a step that is not finite changes nothing, is told, and the schedule goes on with the next one."""
    found = run(*users(gpt, "nan"), "--set", "train.schedule={kind: cosine, warmup_steps: 10, min_lr: 0.0}")
    assert found.code == 0 and "step.skipped" in found.errors
    assert re.search(r"step \d+: the (loss of micro-batch \d+|gradient of parameter '[\w.]+') is", found.errors)
    rates = [line["lr"] for line in found.steps]
    skipped = [line["step"] for line in found.steps if line["loss"] == "NaN"]
    assert skipped == [2] and rates == pytest.approx([3e-5, 6e-5, 6e-5, 9e-5])


def verified(file: Path, store: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """What making steps again found."""
    code, lines, errors = asked("verify-resume", file, "--checkpoints", str(store), *options)
    return code, lines[0] if lines else {}, errors


def recorded_in(file: Path, steps: list[dict[str, Any]]) -> tuple[str, str]:
    """What a run said of each step, as the server hands it out."""
    values = {line["step"]: {"loss": line["loss"], "grad_norm": line["grad_norm"]} for line in steps}
    (file.parent / "recorded.json").write_text(json.dumps(values))
    return "--recorded", str(file.parent / "recorded.json")


def test_steps_made_again_are_the_same_run(mlp: Path) -> None:
    """Property: from the checkpoint before the last, on any ranks, every number and every block is as it was."""
    store = mlp.parent / "checkpoints"
    whole = run(mlp, "--checkpoints", str(store))
    before = sorted(path for path in store.rglob("*"))
    code, found, errors = verified(mlp, store, *recorded_in(mlp, whole.steps), "--set", "resources.ranks=3")
    assert code == 0 and found["verdict"] == "bit-exact", errors
    assert (found["first_step"], found["last_step"], found["compared_steps"]) == (5, 6, 2)
    assert [folder[:15] for folder in found["compared_checkpoints"]] == ["step-0000000006"]
    assert sorted(path for path in store.rglob("*")) == before, "nothing of the job was touched"
    code, found, _ = verified(mlp, store, "--steps", "1", *recorded_in(mlp, whole.steps))
    assert code == 0 and (found["compared_steps"], found["compared_checkpoints"]) == (1, [])


def test_the_first_step_and_the_tensor_that_differ_are_named(mlp: Path) -> None:
    """Property: a loss one bit off names its step; a checkpoint of another run names its step and parameters."""
    store, other = mlp.parent / "checkpoints", mlp.parent / "other"
    whole = run(mlp, "--checkpoints", str(store))
    lines = [
        {**line, "loss": math.nextafter(line["loss"], 9) if line["step"] == 5 else line["loss"]} for line in whole.steps
    ]
    code, found, _ = verified(mlp, store, *recorded_in(mlp, lines))
    assert code == 1 and (found["verdict"], found["differs_at"], found["differs_in"]) == ("differs", 5, ["loss"])
    run(mlp, "--checkpoints", str(other), "--set", "train.seed=2")
    newest = max(store.glob("step-*"))
    shutil.rmtree(newest)
    shutil.copytree(other / newest.name, newest)
    code, found, _ = verified(mlp, store)
    assert code == 1 and found["differs_at"] == 6
    assert any(name.startswith("master of ") for name in found["differs_in"])


def test_what_cannot_be_verified_is_said(mlp: Path) -> None:
    """Property: one checkpoint alone, a damaged start, an unknown folder: exit code 2 and a sentence, no verdict."""
    store = mlp.parent / "checkpoints"
    run(mlp, "--checkpoints", str(store))
    code, _, errors = verified(mlp, store, "--from", "step-0000000009-attempt-000001")
    assert code == 2 and "there is no checkpoint" in errors
    older, newest = sorted(store.glob("step-*"))
    shard = next(older.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-10])
    code, _, errors = verified(mlp, store)
    assert code == 2 and older.name in errors
    shutil.rmtree(newest)
    code, _, errors = verified(mlp, store)
    assert code == 2 and "later step" in errors


def test_the_best_and_every_nth_checkpoint_stay_beside_the_latest(mlp: Path) -> None:
    """Property: each save is measured when the best are kept; what exceeds the wishes of the spec is removed."""
    store = mlp.parent / "checkpoints"
    keep = ["checkpoint.every=1", "checkpoint.keep_best=1", "checkpoint.keep_every=4", "train.steps=8"]
    ran = run(mlp, *(word for each in keep for word in ("--set", each)), "--checkpoints", str(store))
    assert ran.code == 0, ran.errors
    losses = {line["step"]: line["eval_loss"] for line in ran.steps}
    assert len(losses) == 8
    best = min(losses, key=lambda step: (losses[step], -step))
    kept = {int(folder.name.split("-")[1]) for folder in store.glob("step-*")}
    assert kept == {best, 4, 7, 8}


def test_a_run_begins_with_the_weights_and_tokenizer_of_an_exported_folder(gpt: Path) -> None:
    """Property: the validation loss before step 1 is the one that the exported run ended with, in shards too."""
    store = LocalStore(gpt.parent / "checkpoints")
    first = run(gpt, "--checkpoints", str(store.root))
    assert first.code == 0, first.errors
    (name,) = [each for each in list_checkpoints(store) if each.step == 4]
    made = archive(store, read_manifest(store, name.folder), read_spec_file(gpt), "transformers", None)
    folder = gpt.parent / "export"
    with tarfile.open(fileobj=io.BytesIO(b"".join(made.pieces()))) as tar:
        tar.extractall(folder, filter="data")
    tokenizer = {"kind": "file", "path": str(folder / "tokenizer.json")}
    begins = ("--set", f"model.start={folder}", "--set", f"data.tokenizer={json.dumps(tokenizer)}")
    again = run(gpt, *begins, "--set", "zero.stage=3", "--set", "train.seed=7", "--set", "train.steps=1")
    assert again.code == 0, again.errors
    assert again.summary["eval_loss_before"] == first.steps[-1]["eval_loss"]
    refused = run(gpt, *begins, "--set", "model.layers=3")
    assert refused.code == 2 and "use 2" in refused.errors
