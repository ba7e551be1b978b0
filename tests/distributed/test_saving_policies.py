"""Saves beside training as an attempt makes them: by policy, told as events, durable before a stop ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.attempts import Attempt
from tests.distributed.checkpoint_faults import FullAfter, GatedStore
from tests.distributed.rank_pool import Pool, Rank
from workers import saving as saving_module
from workers.contract import STOP_FILE
from zero_engine.catalog import list_checkpoints, verify
from zero_engine.store import LocalStore


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


def wait_while_busy(
    rank: Rank, root: str
) -> tuple[str, list[dict[str, Any]], list[str], list[int], list[tuple[int, str]]]:
    """The save of step 1 hangs until somebody waits for it."""
    saving_module.WAITED_SECONDS = 0.0
    gate = GatedStore(root + "/store", gate=f"gate-{rank.rank}")
    attempt = Attempt(rank, root, ["train.steps=3"], gate)
    attempt.open_gate_when_saving(gate)
    outcome = attempt.run()
    phases = [record["phase"] for record in attempt.told("phase")]
    told = [record["step"] for record in attempt.told("checkpoint")]
    saves = [(record["step"], record["state"]) for record in attempt.told("save")]
    return outcome, attempt.events("checkpoint.waited"), phases, told, saves


def test_by_default_training_waits_and_says_so(pool: Pool, memory_path: Path) -> None:
    """No save is left out; how long training stood still is an event; rank 0 tells each checkpoint once, and of each
    save when it begins and when it has ended.
    """
    first, second = pool.run(2, wait_while_busy, str(memory_path))
    assert first[0] == second[0] == "finished"
    assert first[1][0]["data"]["step"] == 2 and first[1][0]["data"]["count"] == 1 and not second[1]
    assert first[2][:2] == ["saving", "training"], "a person sees what it waits for"
    assert first[3] == saved_steps(memory_path) == [1, 2, 3] and second[3] == []
    assert first[4] == [(step, state) for step in (1, 2, 3) for state in ("begun", "ended")] and second[4] == []


def fail_once(rank: Rank, root: str, policy: str) -> tuple[str, list[str], list[str], int, list[str]]:
    """Rank 1 has no room for the shard of step 4; the save has ended when step 5 begins. What lies there at step 7."""
    store = LocalStore(root + "/store", FullAfter(2000) if rank.rank == 1 else None)
    changes = [f"checkpoint.when_failed={policy}", "train.steps=8", "checkpoint.every=4"]
    attempt = Attempt(rank, root, changes, store)

    def wait(completed: int) -> None:
        if completed == 4:
            assert attempt.saving._saver is not None
            attempt.saving._saver.wait()
        if completed == 7 and rank.rank == 0:
            assert attempt.saving._saver is not None and attempt.saving._saver._sweeper is not None
            attempt.saving._saver._sweeper.join()
            left.extend(store.list())

    left = list[str]()
    outcome = attempt.run(wait)
    failed, shard = (
        [event["message"] for event in attempt.events(f"checkpoint.{name}")] for name in ("failed", "shard_failed")
    )
    return outcome, failed, shard, attempt.reporter.step, left


def test_an_error_of_the_writer_is_an_event_and_training_goes_on(pool: Pool, memory_path: Path) -> None:
    """Both ranks say it in their own words, and what the other rank wrote goes as soon as all have ended; the save at
    the end, which must not fail, ends the attempt.
    """
    first, second = pool.run(2, fail_once, str(memory_path), "continue")
    assert "step 4" in first[1][0] and "rank 1" in first[1][0] and "No space" in first[1][0] and first[2] == []
    assert "step 4" in second[2][0] and "No space" in second[2][0] and second[1] == []
    assert first[4] == [], "no shard stays on a full disk"
    for outcome in (first[0], second[0]):
        assert outcome.startswith("CheckpointError") and "save 8" in outcome and "No space" in outcome


def test_by_policy_a_failed_save_ends_the_attempt_within_a_step(pool: Pool, memory_path: Path) -> None:
    """The step in which it is known is the last one on every rank, and each says why; nobody trains on for nothing."""
    for outcome, _, _, step, _ in pool.run(2, fail_once, str(memory_path), "stop"):
        assert "when_failed is stop" in outcome and "No space" in outcome and outcome.startswith("CheckpointError")
        assert step == 5


def run_out_of_room(rank: Rank, root: str) -> tuple[str, list[str], list[int]]:
    """Rank 1's disk is full from step 3 to step 7; rank 0 removes what exceeds keep_latest."""
    attempt = Attempt(rank, root, ["checkpoint.keep_latest=2", "train.steps=8"])
    attempt.saving._order = attempt.order.model_copy(update={"retains": True})
    seen = list[int]()

    def fill(completed: int) -> None:
        saver = attempt.saving._saver
        if completed == 2 and saver is not None and rank.rank == 1:
            saver.wait()
            saver._store = LocalStore(root + "/store", FullAfter(100))
        if completed == 7 and saver is not None:
            saver.wait()
            seen[:] = saved_steps(Path(root))

    outcome = attempt.run(fill)
    return outcome, [event["message"] for event in attempt.events("checkpoint.failed")], seen


def test_nothing_is_removed_before_the_new_one_is_durable(pool: Pool, memory_path: Path) -> None:
    """Saves fail one after the other on a full disk: the two good ones before them stay until a good one follows."""
    (outcome, failed, seen), _ = pool.run(2, run_out_of_room, str(memory_path))
    assert outcome == "finished" and len(failed) == 5
    assert seen == [1, 2] and saved_steps(memory_path) == [2, 8]


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
