"""Where `shardyard run` begins, and what a resume there may change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.checkpoint_by_hand import ByHand
from workers import local
from workers.local_start import SPEC_FILE, BadInputError, start_of
from workers.resume_rules import changes_between
from workers.spec import JobSpec, load_spec
from zero_engine.manifest import Manifest
from zero_engine.shard import MANIFEST
from zero_engine.store import LocalStore

SPEC = """\
name: one
model: {kind: mlp, hidden: [16]}
data: {kind: digits}
train: {steps: 6, schedule: {kind: constant}}
zero: {stage: 1}
resources: {ranks: 2, device: cpu}
"""


def spec(*changes: tuple[str, str]) -> JobSpec:
    text = SPEC
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return load_spec(text)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The folder of a run that made a checkpoint at step 5."""
    start_of(spec(), tmp_path / "store", resume=False)
    ByHand(LocalStore(tmp_path / "store")).publish()
    return tmp_path / "store"


OTHER_RUN = {
    "train.seed is 9, and the run that saved had 1": ("steps: 6", "steps: 6, seed: 9"),
    'train.precision is "bf16", and the run that saved had "fp32"': ("steps: 6", "steps: 6, precision: bf16"),
    "train.global_batch is 32, and": ("steps: 6", "steps: 6, global_batch: 32"),
    "train.optimizer.lr is 0.5, and": ("steps: 6", "steps: 6, optimizer: {kind: adamw, lr: 0.5}"),
    'train.schedule.kind is "cosine", and': ("{kind: constant}", "{kind: cosine}"),
    "train.gradient_clipping is 2.0, and": ("steps: 6", "steps: 6, gradient_clipping: 2.0"),
    "model.hidden is [32], and": ("hidden: [16]", "hidden: [32]"),
    "resources.threads_per_rank is 3, and": ("ranks: 2", "ranks: 2, threads_per_rank: 3"),
}


@pytest.mark.parametrize(("words", "change"), OTHER_RUN.items())
def test_a_resume_that_would_be_another_run_is_refused_by_field_and_value(
    store: Path, words: str, change: tuple[str, str]
) -> None:
    """The store and the ways out are named; nothing of the store is touched."""
    before = sorted(store.rglob("*"))
    with pytest.raises(BadInputError) as refused:
        start_of(spec(change), store, resume=True)
    said = str(refused.value)
    assert words in said and str(store) in said and "keep this" in said and "shardyard fork" in said
    assert sorted(store.rglob("*")) == before


def test_a_resume_may_change_what_never_changes_a_bit(store: Path) -> None:
    """As over REST: ranks, the zero section, more steps; and how often is evaluated and saved. The chunk is kept."""
    wanted = spec(
        ("name: one", "name: two\npriority: 9\ncheckpoint: {every: 3}"),
        ("ranks: 2", "ranks: 4"),
        ("{stage: 1}", "{stage: 3, offload: optimizer, activation_checkpointing: full}"),
        ("steps: 6", "steps: 60, eval: {every: 1}"),
    )
    start = start_of(wanted, store, resume=True)
    assert (start.chunk, start.fence) == (2, 2)
    assert start.resume is not None and start.resume.step == 5


def with_arithmetic(store: Path, change: Callable[[Manifest], Manifest]) -> None:
    """The newest checkpoint as if it had been saved so."""
    (file,) = store.glob(f"*/{MANIFEST}")
    file.write_bytes(change(Manifest.decode(file.read_bytes())).encode())


def test_without_the_runs_spec_the_checkpoint_tells_what_it_can(store: Path) -> None:
    """Seed, precision, micro-batches and schedule stand in each checkpoint."""
    (store / SPEC_FILE).unlink()
    assert start_of(spec(("hidden: [16]", "hidden: [32]")), store, resume=True).resume is not None
    with_arithmetic(store, lambda made: replace(made, arithmetic=replace(made.arithmetic, seed=7, micro_batches=8)))
    with pytest.raises(BadInputError, match=r"train\.seed is 1, .* had 7; train\.global_batch / .* is 4, .* had 8"):
        start_of(spec(), store, resume=True)


def test_the_rules_look_at_what_a_field_says_not_at_how_it_was_written() -> None:
    """Defaults written out are no change; where files lie is none either."""
    written = load_spec(spec().model_dump_json())
    assert changes_between(spec(), written) == []
    python = ("{kind: mlp, hidden: [16]}", "{kind: python, entry: 'a:b', path: /one, kwargs: {width: 3}}")
    there, moved = spec(python), spec(python, ("/one", "/two"))
    assert changes_between(there, moved) == []
    (change,) = changes_between(there, spec(python, ("width: 3", "width: 4")))
    assert str(change) == "model.kwargs.width is 4, and the run that saved had 3"


def test_a_folder_that_holds_nothing_to_resume_is_named_and_not_made(tmp_path: Path, store: Path) -> None:
    with pytest.raises(BadInputError, match=f"--checkpoints {tmp_path}/savero: there is no such folder"):
        start_of(spec(), tmp_path / "savero", resume=True)
    assert not (tmp_path / "savero").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInputError, match=f"{tmp_path}/empty holds no checkpoint to resume from"):
        start_of(spec(), tmp_path / "empty", resume=True)
    (manifest,) = store.glob(f"*/{MANIFEST}")
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(BadInputError, match=f"{store} holds no checkpoint that can be read"):
        start_of(spec(), store, resume=True)


def test_the_command_ends_with_code_2_before_any_rank_starts(store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`--set` on a resume goes by the same rules as the file."""
    file = store.parent / "spec.yaml"
    file.write_text(SPEC)
    words = [str(file), "--json", "--checkpoints", str(store), "--resume", "--data-dir", str(store.parent / "data")]
    assert local.main([*words, "--set", "train.seed=9"]) == 2
    said = capfd.readouterr()
    assert not said.out and "train.seed is 9, and the run that saved had 1" in said.err
