"""Saves beside training as an attempt makes them: by policy, told as events, durable before a stop ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.checkpoint_faults import FullAfter, GatedStore
from tests.distributed.rank_pool import Pool, Rank
from workers import saving as saving_module
from workers.build import build_model, loss_of, optimizer_of
from workers.contract import SPOOL_FILE, STOP_FILE, AttemptId, JobId, LaunchOrder
from workers.contract import Rank as RankNumber
from workers.data.opening import open_data
from workers.planner import engine_config
from workers.reporter import Phase, Reporter
from workers.restoring import Progressed
from workers.saving import StoreSaving
from workers.spec import read_spec_file
from workers.training import Training
from zero_engine import Engine
from zero_engine.catalog import list_checkpoints, verify
from zero_engine.store import LocalStore, Store

SPEC = """\
name: mlp
model: {kind: mlp, hidden: [16, 12]}
data: {kind: digits}
train: {steps: 6, eval: {every: 0}, schedule: {kind: constant}}
zero: {stage: 2}
resources: {ranks: 2, device: cpu}
checkpoint: {every: 1, keep_latest: 9}
"""


class Attempt:
    """One rank's training with a store of the test's choice."""

    def __init__(self, rank: Rank, root: str, changes: list[str], store: Store) -> None:
        self.folder = Path(root, f"rank-{rank.rank}")
        self.folder.mkdir(parents=True)
        (self.folder / "spec.yaml").write_text(SPEC)
        spec = read_spec_file(self.folder / "spec.yaml", changes)
        self.order = LaunchOrder(
            job_id=JobId("j"), attempt_id=AttemptId("a"), fence=1, rank=RankNumber(rank.rank), world_size=rank.ranks,
            master_addr="", master_port=0, device="cpu", spec=spec, chunk=spec.chunk, rank_folder=str(self.folder),
            cache_folder=str(self.folder), store_url=str(Path(root, "store")),
        )  # fmt: skip
        data = open_data(spec, self.folder, print)
        config = engine_config(spec, spec.chunk, 2)
        self.engine = Engine(build_model(spec, data), config, optimizer_of(spec.train.optimizer), rank.group)
        self.reporter = Reporter(self.folder)
        self.saving = StoreSaving(self.order, self.engine, data, self.reporter)
        self.saving._store = store
        self.training = Training(self.order, self.engine, data, loss_of(self.engine.module), self.reporter, self.saving)

    def run(self, at_step: Callable[[int], None] = lambda completed: None) -> str:
        """Train; how it ended: "finished", "stopped", or the error's class and words. `at_step`: called before each."""
        step = self.training._step

        def watched(completed: int) -> Any:
            at_step(completed)
            return step(completed)

        self.training._step = watched  # type: ignore[method-assign]
        try:
            outcome: str = self.training.run(Progressed())
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
            self.engine.close(outcome)
        else:
            self.engine.close()
        self.reporter.close()
        return outcome

    def open_gate_when_saving(self, store: GatedStore) -> None:
        """The store hangs until this rank says that it waits for a save."""
        phase = self.reporter.phase

        def spy(name: Phase) -> None:
            if name == "saving":
                store.open_gate()
            phase(name)

        self.reporter.phase = spy  # type: ignore[assignment,method-assign]

    def told(self, kind: str) -> list[dict[str, Any]]:
        """Its records of one kind."""
        records = [json.loads(line) for line in (self.folder / SPOOL_FILE).read_text().splitlines()]
        return [record for record in records if record["kind"] == kind]

    def events(self, action: str) -> list[dict[str, Any]]:
        return [record for record in self.told("event") if record["action"] == action]


def saved_steps(root: Path) -> list[int]:
    """Steps of the checkpoints in the store; each of them verifies."""
    store = LocalStore(root / "store")
    names = list_checkpoints(store)
    assert all(verify(store, name.folder).ok for name in names)
    return sorted(name.step for name in names)


def skip_while_busy(rank: Rank, root: str) -> tuple[str, list[int], list[int], list[str]]:
    """The save of step 1 hangs until step 5 begins."""
    gate = GatedStore(root + "/store", gate=f"gate-{rank.rank}")
    attempt = Attempt(rank, root, ["checkpoint.when_busy=skip"], gate)
    outcome = attempt.run(lambda completed: gate.open_gate() if completed == 4 else None)
    skips = attempt.events("checkpoint.skipped")
    counts = [event["data"]["count"] for event in skips]
    problems = [event["message"] for event in attempt.events("checkpoint.failed")]
    return outcome, [event["data"]["step"] for event in skips], counts, problems


def test_a_save_that_is_due_too_early_is_skipped_by_all_ranks_alike(pool: Pool, memory_path: Path) -> None:
    """Skips are counted and told, none is a failure, and every shard that was begun belongs to a checkpoint."""
    first, second = pool.run(2, skip_while_busy, str(memory_path))
    outcome, steps, counts, problems = first
    assert outcome == second[0] == "finished" and steps[:3] == [2, 3, 4] and not problems
    assert counts == list(range(1, len(steps) + 1)) and second[1] == []
    assert saved_steps(memory_path) == [step for step in range(1, 7) if step not in steps]
    folders = {path.parent.name for path in (memory_path / "store").rglob("*.safetensors")}
    assert len(folders) == len(saved_steps(memory_path)), "no rank wrote a shard for a save that another one skipped"


def wait_while_busy(rank: Rank, root: str) -> tuple[str, list[dict[str, Any]], list[str], list[int]]:
    """The save of step 1 hangs until somebody waits for it."""
    saving_module.WAITED_SECONDS = 0.0
    gate = GatedStore(root + "/store", gate=f"gate-{rank.rank}")
    attempt = Attempt(rank, root, ["train.steps=3"], gate)
    attempt.open_gate_when_saving(gate)
    outcome = attempt.run()
    phases = [record["phase"] for record in attempt.told("phase")]
    told = [record["step"] for record in attempt.told("checkpoint")]
    return outcome, attempt.events("checkpoint.waited"), phases, told


def test_by_default_training_waits_and_says_so(pool: Pool, memory_path: Path) -> None:
    """No save is left out; how long training stood still is an event; rank 0 tells each checkpoint once."""
    first, second = pool.run(2, wait_while_busy, str(memory_path))
    assert first[0] == second[0] == "finished"
    assert first[1][0]["data"]["step"] == 2 and first[1][0]["data"]["count"] == 1 and not second[1]
    assert first[2][:2] == ["saving", "training"], "a person sees what it waits for"
    assert first[3] == saved_steps(memory_path) == [1, 2, 3] and second[3] == []


def fail_once(rank: Rank, root: str, policy: str) -> tuple[str, list[str], list[str]]:
    """Rank 1 has no room for the shard of its first save."""
    store = LocalStore(root + "/store", FullAfter(2000) if rank.rank == 1 else None)
    attempt = Attempt(
        rank, root, [f"checkpoint.when_failed={policy}", "train.steps=400", "checkpoint.every=150"], store
    )
    outcome = attempt.run()
    failed, shard = (
        [event["message"] for event in attempt.events(f"checkpoint.{name}")] for name in ("failed", "shard_failed")
    )
    return outcome, failed, shard


def test_an_error_of_the_writer_is_an_event_and_training_goes_on(pool: Pool, memory_path: Path) -> None:
    """Both ranks say it in their own words; the save at the end, which must not fail, ends the attempt."""
    first, second = pool.run(2, fail_once, str(memory_path), "continue")
    assert "step 150" in first[1][0] and "rank 1" in first[1][0] and "No space" in first[1][0] and first[2] == []
    assert "step 150" in second[2][0] and "No space" in second[2][0] and second[1] == []
    for outcome in (first[0], second[0]):
        assert outcome.startswith("CheckpointError") and "save 400" in outcome and "No space" in outcome


def test_by_policy_a_failed_save_ends_the_attempt_on_all_ranks(pool: Pool, memory_path: Path) -> None:
    """The rank that met the error names it, the others are told; nobody trains on for nothing."""
    for outcome, *_ in pool.run(2, fail_once, str(memory_path), "stop"):
        assert "when_failed is stop" in outcome and outcome.split(":")[0] in ("CheckpointError", "PeerError")


def stop_beside_a_save(rank: Rank, root: str) -> tuple[str, list[int]]:
    """A stop at step 2 while the save of step 1 hangs."""
    gate = GatedStore(root + "/store", gate=f"gate-{rank.rank}")
    attempt = Attempt(rank, root, [], gate)
    attempt.open_gate_when_saving(gate)
    outcome = attempt.run(
        lambda completed: (attempt.folder / STOP_FILE).touch() if completed == 1 and rank.rank == 1 else None
    )
    return outcome, [record["step"] for record in attempt.told("checkpoint")]


def test_a_stop_waits_for_durability(pool: Pool, memory_path: Path) -> None:
    """Cancel and pause leave when the save under way and the one of the last step are both on the disk."""
    assert pool.run(2, stop_beside_a_save, str(memory_path)) == [("stopped", [1, 2]), ("stopped", [])]
    assert saved_steps(memory_path) == [1, 2]


@pytest.mark.parametrize(("every", "stands"), [(0, False), (6, False), (3, True)])
def test_a_writer_stands_only_where_a_save_comes_beside_training(
    pool: Pool, memory_path: Path, every: int, stands: bool
) -> None:
    """A short run, or one that saves only at its end, pays for no process."""
    assert pool.run(2, has_writer, str(memory_path), every) == [stands, stands]


def has_writer(rank: Rank, root: str, every: int) -> bool:
    attempt = Attempt(rank, root, [f"checkpoint.every={every}"], LocalStore(root + "/store"))
    assert attempt.run() == "finished"
    return attempt.saving._saver is not None
