"""Background saves: the training thread only waits for copies, and every failure is reported and survived."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.checkpoint_faults import FullAfter, GatedStore, KilledAt
from tests.distributed.engine_cases import engine_of, reference_of, train
from tests.distributed.rank_pool import Pool, Rank
from tests.waiting import PATIENCE_SECONDS
from zero_engine import Engine, ZeroConfig
from zero_engine.catalog import list_checkpoints, read_manifest, verify
from zero_engine.errors import UsageError
from zero_engine.saver import Saver, SaveReport
from zero_engine.store import LocalStore

CONFIG = ZeroConfig(micro_batches=4, chunk=2, gradient_clipping=0.5)


def config_of(stage: int) -> ZeroConfig:
    return ZeroConfig(**{**vars(CONFIG), "stage": stage})


def ended(saver: Saver) -> SaveReport:
    """The report of the one save under way."""
    (report,) = saver.finish()
    return report


def reference_digests(steps: int) -> list[str]:
    reference, digests = reference_of(CONFIG), []
    for _ in range(steps):
        train(reference, 1)
        digests.append(reference.digest())
    return digests


def save_every_step(rank: Rank, stage: int, store: str, steps: int) -> tuple[list[SaveReport], str, int]:
    """Train and save in the background after each step; reports, the last digest, bytes sent for saving."""
    engine = engine_of(rank, config_of(stage))
    saver = engine.saver(store, fence=1)
    reports = []
    for step in range(1, steps + 1):
        train(engine, 1)
        assert saver.save(step)
        reports += saver.poll()
    reports += saver.finish()
    digest, sent = engine.digest(), engine.ledger("save").total_bytes
    engine.close()
    return reports, digest, sent


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 0), (2, 2), (3, 1), (4, 3)])
def test_each_background_save_holds_the_state_of_its_step(
    pool: Pool, memory_path: Path, ranks: int, stage: int
) -> None:
    """Training on does not leak into the save, saving does not leak into training, and no collective is used."""
    expected = reference_digests(4)
    outcomes = pool.run(ranks, save_every_step, stage, str(memory_path), 4)
    for rank, (reports, digest, sent) in enumerate(outcomes):
        assert [(report.step, report.problem, report.skipped) for report in reports] == [
            (step, "", False) for step in (1, 2, 3, 4)
        ]
        assert digest == expected[-1] and sent == 0
        assert all((report.manifest is not None) == (rank == 0) for report in reports)
    store = LocalStore(memory_path)
    names = list_checkpoints(store)
    assert [read_manifest(store, name.folder).digest for name in reversed(names)] == expected
    assert all(verify(store, name.folder).ok for name in names)


def save_with_late_copies(rank: Rank, store: str) -> tuple[str, bool, str]:
    """The copies of step 1 begin only when the engine asks to update for step 2."""
    engine = engine_of(rank, config_of(1))
    saver = engine.saver(store, fence=1)
    train(engine, 1)
    digest = engine.digest()
    asked = threading.Event()
    take, hold = saver._copy.take, saver.hold

    def late(state: Any) -> Any:
        asked.wait(PATIENCE_SECONDS)
        return take(state)

    def ask() -> None:
        asked.set()
        hold()

    saver._copy.take, saver.hold = late, ask  # type: ignore[method-assign]
    saver.save(1)
    train(engine, 1)
    report = ended(saver)
    engine.close()
    return digest, report.blocked_seconds > 0, report.problem


def test_an_update_waits_for_the_copies(pool: Pool, memory_path: Path) -> None:
    """However late the copies are, the update does not overtake them."""
    outcomes = pool.run(2, save_with_late_copies, str(memory_path))
    assert outcomes == [(outcomes[0][0], True, "")] * 2
    store = LocalStore(memory_path)
    (name,) = list_checkpoints(store)
    assert read_manifest(store, name.folder).digest == outcomes[0][0]


def save_faster_than_the_store(rank: Rank, root: str, policy: Any) -> list[tuple[int, bool, str]]:
    """Save 1 hangs in the store until save 2 was asked for."""
    engine = engine_of(rank, config_of(2))
    store = GatedStore(root, gate=f"gate-{rank.rank}")
    saver = engine.saver(store, fence=1, policy=policy)
    train(engine, 1)
    saver.save(1)
    saver.hold()
    if policy == "skip":
        assert not saver.save(2)
        store.open_gate()
    else:
        threading.Timer(0.2, store.open_gate).start()
        assert saver.save(2)
    reports = saver.finish()
    assert saver.save(3)
    reports += saver.finish()
    engine.close()
    return [(report.step, report.skipped, report.problem) for report in reports]


@pytest.mark.parametrize("policy", ["wait", "skip"])
def test_a_save_that_is_due_too_early_waits_or_is_skipped(pool: Pool, memory_path: Path, policy: str) -> None:
    """The policy is followed, counted and shown; a skipped save holds nobody up."""
    outcomes = pool.run(2, save_faster_than_the_store, str(memory_path), policy)
    steps = [name.step for name in reversed(list_checkpoints(LocalStore(memory_path)))]
    if policy == "skip":
        assert sorted(outcomes[0]) == [(1, False, ""), (2, True, ""), (3, False, "")]
        assert steps == [1, 3]
    else:
        assert outcomes[0] == [(1, False, ""), (2, False, ""), (3, False, "")]
        assert steps == [1, 2, 3]


def lose_the_writer(rank: Rank, root: str) -> list[tuple[int, str]]:
    """kill -9 of rank 1's writer while it works; then another save."""
    engine = engine_of(rank, config_of(1))
    store = GatedStore(root, gate=f"gate-{rank.rank}")
    saver = engine.saver(store, fence=1)
    train(engine, 1)
    saver.save(1)
    saver.hold()
    if rank.rank == 1:
        os.kill(saver._writer.pid, signal.SIGKILL)
    store.open_gate()
    reports = saver.finish()
    train(engine, 1)
    saver.save(2)
    reports += saver.finish()
    engine.close()
    return [(report.step, report.problem) for report in reports]


def test_a_killed_writer_is_reported_and_replaced(pool: Pool, memory_path: Path) -> None:
    """Training goes on; rank 0 is told why the shard is missing; the next save is good."""
    first, second = pool.run(2, lose_the_writer, str(memory_path))
    assert second[0][0] == 1 and "SIGKILL" in second[0][1] and second[1] == (2, "")
    assert first[0][0] == 1 and "rank 1" in first[0][1] and "SIGKILL" in first[0][1] and first[1] == (2, "")
    assert [name.step for name in list_checkpoints(LocalStore(memory_path))] == [2]


def stop_the_writer(rank: Rank, root: str, file_bytes: int) -> list[tuple[int, str]]:
    """Rank 0's writer stands still for ever, before it has read its order; then another save."""
    engine = engine_of(rank, config_of(1))
    saver = engine.saver(root, fence=1, patience_seconds=0.3 if rank.rank == 0 else 60)
    if rank.rank == 0:
        os.kill(saver._writer.pid, signal.SIGSTOP)
    reports = []
    for step in (1, 2):
        train(engine, 1)
        saver.save(step, files={"tokenizer.json": bytes(file_bytes)})
        saver._patience_seconds = 60  # the next writer's
        reports += saver.finish()
        engine._agreement.tell("", f"after {step}")
    engine.close()
    return [(report.step, report.problem) for report in reports]


@pytest.mark.parametrize("file_bytes", [10, 1 << 20])  # an order that waits in the socket, one that is too large to
def test_a_writer_that_gets_nothing_done_is_killed_and_replaced(pool: Pool, memory_path: Path, file_bytes: int) -> None:
    """A save without progress has its limit: training is not held up by it for ever, and the next save is good."""
    first, second = pool.run(2, stop_the_writer, str(memory_path), file_bytes)
    assert first[0][0] == 1 and "got nothing done" in first[0][1] and first[1] == (2, "")
    assert second == [(1, ""), (2, "")], "rank 1 did its part both times"
    assert [name.step for name in list_checkpoints(LocalStore(memory_path))] == [2]


def save_with_a_file(rank: Rank, root: str) -> str:
    engine = engine_of(rank, config_of(1))
    saver = engine.saver(root, fence=1)
    train(engine, 1)
    saver.save(1, files={"tokenizer.json": b"words"})
    problem = ended(saver).problem
    engine.close()
    return problem


def test_small_files_go_with_the_save(pool: Pool, memory_path: Path) -> None:
    """They are durable before the manifest is, and stand in its folder once."""
    assert pool.run(2, save_with_a_file, str(memory_path)) == ["", ""]
    (name,) = list_checkpoints(LocalStore(memory_path))
    assert (memory_path / name.folder / "tokenizer.json").read_bytes() == b"words"
    assert verify(LocalStore(memory_path), name.folder).ok


def save_until_nothing_dies(rank: Rank, root: str, victim: int) -> list[int]:
    """Saves in which `victim`'s writer is killed before call 0, 1, 2, ... until one goes through; the steps tried."""
    engine = engine_of(rank, config_of(2))
    saver = engine.saver(root, fence=1)
    train(engine, 1)
    step, tried, done = 1, list[int](), False
    while not done:
        saver._store = LocalStore(root, KilledAt(step - 1)) if rank.rank == victim else LocalStore(root)
        saver.save(step)
        report = ended(saver)
        assert report.problem or rank.rank != 0 or report.manifest is not None
        tried.append(step)
        done = not any(engine._agreement.tell(report.problem, f"step {step}"))
        step += 1
    engine.close()
    return tried


@pytest.mark.parametrize("victim", [0, 1])
def test_a_writer_killed_at_any_call_leaves_no_half_checkpoint(pool: Pool, memory_path: Path, victim: int) -> None:
    """Enumerated: every open, write, sync, rename of shard, record and manifest. What is listed verifies."""
    tried = pool.run(2, save_until_nothing_dies, str(memory_path), victim)[0]
    assert len(tried) > 12
    store = LocalStore(memory_path)
    listed = {name.step: name.folder for name in list_checkpoints(store)}
    assert tried[-1] in listed
    assert all(verify(store, folder).ok for folder in listed.values())
    assert len(listed) <= 3, "only a death after the manifest's rename leaves a checkpoint"


def save_on_a_full_disk(rank: Rank, root: str) -> list[tuple[int, str]]:
    engine = engine_of(rank, config_of(3))
    saver = engine.saver(root, fence=1)
    train(engine, 1)
    good, full = LocalStore(root), LocalStore(root, FullAfter(2000))
    reports = []
    for step, store in ((1, good), (2, full if rank.rank == 1 else good), (3, good)):
        saver._store = store
        saver.save(step)
        reports.append(ended(saver))
        engine._agreement.tell("", f"after {step}")
    engine.close()
    return [(report.step, report.problem) for report in reports]


def test_a_full_disk_is_an_event_and_the_next_save_is_good(pool: Pool, memory_path: Path) -> None:
    """The rank's own report and rank 0's name the cause; older checkpoints stay."""
    first, second = pool.run(2, save_on_a_full_disk, str(memory_path))
    assert "No space" in second[1][1] and "No space" in first[1][1]
    assert [problem for step, problem in first + second if step != 2] == [""] * 4
    assert [name.step for name in list_checkpoints(LocalStore(memory_path))] == [3, 1]


def fall_behind(rank: Rank, root: str) -> list[tuple[int, bool, str]]:
    """Rank 1's first save hangs until rank 0 has given up three; then all is well again."""
    engine = engine_of(rank, config_of(2))
    store = GatedStore(root, gate="gate") if rank.rank == 1 else LocalStore(root)
    saver = engine.saver(store, fence=1, policy="skip", patience_seconds=PATIENCE_SECONDS)
    saver._patience_seconds = 0.2  # with the silent rank 1; the writer itself has all the time that it needs
    reports = []
    for step in (1, 2, 3):
        train(engine, 1)
        saver.save(step)
        if rank.rank == 0:
            reports += saver.finish()
        saver._patience_seconds = PATIENCE_SECONDS  # rank 1 speaks from here on
        engine._agreement.tell("", f"after {step}")
    if isinstance(store, GatedStore):
        store.open_gate()
        reports += saver.finish()
        assert (Path(root) / "step-0000000001-attempt-000001" / "rank-00001.safetensors").exists(), "late, not lost"
    engine._agreement.tell("", "late")
    train(engine, 1)
    saver.save(4)
    reports += saver.finish()
    engine.close()
    return sorted((report.step, report.skipped, report.problem) for report in reports)


def test_a_rank_that_is_slow_by_two_checkpoints_spoils_none(pool: Pool, memory_path: Path) -> None:
    """Its late shard and record belong to a save that was given up; they enter no other checkpoint.

    The next save that goes well removes what those before it left.
    """
    first, second = pool.run(2, fall_behind, str(memory_path))
    assert [(step, bool(problem)) for step, _, problem in first] == [(1, True), (2, True), (3, True), (4, False)]
    assert "no shard from ranks [1]" in first[0][2]
    assert all("rank 1" in problem and "skipped" in problem for _, _, problem in first[1:3])
    assert second == [(1, False, ""), (2, True, ""), (3, True, ""), (4, False, "")]
    store = LocalStore(memory_path)
    assert [name.step for name in list_checkpoints(store)] == [4]
    assert verify(store, list_checkpoints(store)[0].folder).ok
    assert [path.name for path in memory_path.iterdir() if path.is_dir()] == ["step-0000000004-attempt-000001"]


def save_non_finite(rank: Rank, root: str) -> str:
    engine = engine_of(rank, config_of(1))
    saver = engine.saver(root, fence=1)
    train(engine, 1)
    if rank.rank == 1:
        piece = engine.master.pieces[0]
        engine.master.tensors(piece.run, piece.range)["parameter"][0] = float("nan")
    saver.save(1)
    problem = ended(saver).problem
    engine.close()
    return problem


def test_a_state_that_is_not_finite_is_refused_in_the_background_too(pool: Pool, memory_path: Path) -> None:
    """The rank that holds it names the parameter; rank 0 repeats it; there is no checkpoint."""
    for problem in pool.run(2, save_non_finite, str(memory_path)):
        assert "is not finite" in problem
    assert list_checkpoints(LocalStore(memory_path)) == ()


def resident_kib() -> int:
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def save_many_times(rank: Rank, root: str, saves: int) -> tuple[int, int, bool]:
    """Growth after the first five saves, in KiB and descriptors; whether the writer has torch."""
    engine = engine_of(rank, config_of(2), width=128)
    saver = engine.saver(root, fence=1)
    for step in range(1, saves + 1):
        train(engine, 1)
        saver.save(step)
        assert ended(saver).problem == ""
        if step == 5:
            gc.collect()  # what earlier tests left
            before = resident_kib(), len(os.listdir("/proc/self/fd"))
    grown = resident_kib() - before[0], len(os.listdir("/proc/self/fd")) - before[1]
    has_torch = "libtorch" in Path(f"/proc/{saver._writer.pid}/maps").read_text()
    engine.close()
    return *grown, has_torch


def test_thirty_saves_leave_memory_flat(pool: Pool, memory_path: Path) -> None:
    """One shared copy, one writer, used again; the writer never loads torch. A leak of each save's copy is 60 MiB."""
    for grown_kib, grown_descriptors, has_torch in pool.run(2, save_many_times, str(memory_path), 30):
        assert grown_kib < 16 * 1024 and grown_descriptors == 0 and not has_torch


def save_in_both_ways_at_once(rank: Rank, root: str) -> tuple[list[bool], list[str], bool]:
    """The same step in the background twice and then waited for: what began, problems, one digest."""
    engine = engine_of(rank, config_of(2))
    saver = engine.saver(root, fence=1)
    train(engine, 1)
    began = [saver.save(1), saver.save(1)]
    manifest = engine.save(root, step=1, fence=1)
    problems = [report.problem for report in saver.finish()]
    same = manifest.digest == engine.digest()
    engine.close()
    return began, problems, same


def test_one_step_is_one_checkpoint_however_often_it_is_asked_for(pool: Pool, memory_path: Path) -> None:
    """A save that is waited for first waits for the one under way, and then finds it published."""
    assert pool.run(2, save_in_both_ways_at_once, str(memory_path)) == [([True, False], [""], True)] * 2
    assert len(list_checkpoints(LocalStore(memory_path))) == 1


def write_over_a_published_folder(rank: Rank, root: str) -> list[str]:
    """A second saver under the same fence saves another state as the same step."""
    engine = engine_of(rank, config_of(1))
    problems = []
    for _ in range(2):
        train(engine, 1)
        saver = engine.saver(root, fence=1)
        saver.save(1)
        problems.append(ended(saver).problem)
        engine._agreement.tell("", "next")
    engine.close()
    return problems


def test_a_published_folder_is_never_written_again(pool: Pool, memory_path: Path) -> None:
    """The second save is a problem, and the first checkpoint is whole."""
    for first, second in pool.run(2, write_over_a_published_folder, str(memory_path)):
        assert first == "" and "not written again" in second
    (name,) = list_checkpoints(LocalStore(memory_path))
    assert verify(LocalStore(memory_path), name.folder).ok


def fail_beside_a_save(rank: Rank, root: str) -> int:
    """Rank 0's writer waits for rank 1, which never saves; then rank 0 fails and closes."""
    engine = engine_of(rank, config_of(1))
    saver = engine.saver(root, fence=1)
    train(engine, 1)
    if rank.rank == 0:
        saver.save(1)
        saver.hold()
    engine.close("something else failed")
    return saver._writer.pid


def test_a_failing_rank_does_not_wait_for_its_save(pool: Pool, memory_path: Path) -> None:
    """Closing with an error kills the writer, which no checkpoint minds."""
    for pid in pool.run(2, fail_beside_a_save, str(memory_path)):
        assert not Path(f"/proc/{pid}").exists()
    assert list_checkpoints(LocalStore(memory_path)) == ()


def leave_no_process(rank: Rank, root: str) -> int:
    engine: Engine = engine_of(rank, config_of(0))
    saver = engine.saver(root, fence=1)
    train(engine, 1)
    saver.save(1)
    engine.close()
    return saver._writer.pid


def test_closing_the_engine_ends_the_writer(pool: Pool, memory_path: Path) -> None:
    """The save under way is finished first; then no process is left."""
    for pid in pool.run(2, leave_no_process, str(memory_path)):
        assert not Path(f"/proc/{pid}").exists()
    assert len(list_checkpoints(LocalStore(memory_path))) == 1


def close_one_after_the_other(rank: Rank, store: str) -> tuple[bool, str]:
    """A saver, then its engine, twice: whether a file that was opened in between stays open; and a step more."""
    engine = engine_of(rank, config_of(1))
    saver = engine.saver(store, fence=1)
    train(engine, 1)
    saver.save(1)
    saver.close()
    own = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
    for closing in (saver, engine, engine):
        closing.close()
    still = all(os.fstat(number) for number in own)
    for number in own:
        os.close(number)
    with pytest.raises(UsageError) as refused:
        train(engine, 1)
    return still, str(refused.value)


def test_what_is_closed_is_closed_once(pool: Pool, memory_path: Path) -> None:
    """A descriptor that is closed again is somebody else's by then; a closed engine trains nothing."""
    for still, refused in pool.run(2, close_one_after_the_other, str(memory_path)):
        assert still and "the engine is closed" in refused
