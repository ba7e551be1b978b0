"""Whatever breaks, an older verified checkpoint loads, the reason is said, and nothing is wrong silently."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.checkpoint_faults import Away, Counting, Denied, FullAfter, Vanishing
from tests.distributed.engine_cases import adamw, built, engine_of, tied, train
from tests.distributed.rank_pool import Pool, Rank
from zero_engine import AdamW, Engine, ZeroConfig
from zero_engine.catalog import list_checkpoints, verify
from zero_engine.checkpoint import NoneUsable, draft_of
from zero_engine.file_calls import FileCalls
from zero_engine.manifest import CheckpointError, Progress
from zero_engine.reshard import MASTER, runs_of
from zero_engine.shard import Record, Source, publish, put_record, wait_for_records, write_shard
from zero_engine.state import DTYPES, block_bytes, bytes_of
from zero_engine.store import LocalStore, StoreAway

CONFIG = ZeroConfig(stage=2, micro_batches=4, chunk=2)


def save_twice(rank: Rank, store: str) -> list[str]:
    """Checkpoints of steps 1 and 2; their digests."""
    engine = engine_of(rank, CONFIG)
    digests = []
    for _ in range(2):
        train(engine, 1)
        digests.append(engine.save(store, fence=1).digest)
    engine.close()
    return digests


def load(rank: Rank, store: Any, stage: int, folder: str | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Load the newest: the digest, and what was refused."""
    config = ZeroConfig(stage=stage, micro_batches=4, chunk=2)
    engine = Engine.load(store, built(tied), config, adamw(), rank.group, folder=folder)
    assert engine.loaded is not None and engine.loaded.manifest.digest == engine.digest()
    assert {item.fault for item in engine.loaded.refused} <= {"damaged"}
    digest = engine.digest()
    engine.close()
    return digest, [(item.folder, item.reason) for item in engine.loaded.refused]


NEW = "step-0000000002-attempt-000001"
OLD = "step-0000000001-attempt-000001"


def truncated(folder: Path) -> None:
    path = folder / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def flipped(folder: Path) -> None:
    path = folder / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def missing(folder: Path) -> None:
    (folder / "rank-00000.safetensors").unlink()


def empty(folder: Path) -> None:
    (folder / "rank-00000.safetensors").write_bytes(b"")


def from_another_step(folder: Path) -> None:
    shutil.copy(folder.parent / OLD / "rank-00001.safetensors", folder)


def exchanged(folder: Path) -> None:
    first, second = folder / "rank-00000.safetensors", folder / "rank-00001.safetensors"
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)


def torn_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-7])


def foreign_manifest(folder: Path) -> None:
    shutil.copy(folder.parent / OLD / "manifest.json", folder)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (truncated, "rank-00001.safetensors"),
        (flipped, "does not match"),
        (missing, "rank-00000.safetensors"),
        (empty, "truncated"),
        (from_another_step, "does not match"),
        (exchanged, "does not match"),
        (torn_manifest, "truncated or damaged"),
        (foreign_manifest, "belongs to"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_reason(
    pool: Pool, memory_path: Path, harm: Callable[[Path], None], reason: str
) -> None:
    """All ranks fall back together to the older one, also when only one of them met the damage."""
    old, _ = pool.run(2, save_twice, str(memory_path))[0]
    harm(memory_path / NEW)
    for ranks, stage in ((2, 2), (3, 3), (1, 0)):
        for digest, refused in pool.run(ranks, load, str(memory_path), stage):
            assert digest == old
            assert [folder for folder, _ in refused] == [NEW] and reason in refused[0][1], refused


def test_a_folder_without_a_manifest_is_never_tried(pool: Pool, memory_path: Path) -> None:
    """It is not even refused: it is no checkpoint."""
    old, _ = pool.run(2, save_twice, str(memory_path))[0]
    (memory_path / NEW / "manifest.json").unlink()
    assert pool.run(2, load, str(memory_path), 1) == [(old, [])] * 2


def test_a_named_checkpoint_is_taken_or_the_one_before_it(pool: Pool, memory_path: Path) -> None:
    """Naming one ignores newer ones; when it is damaged, an older one stands in, never a newer one."""
    old, new = pool.run(2, save_twice, str(memory_path))[0]
    assert pool.run(2, load, str(memory_path), 1, OLD) == [(old, [])] * 2
    assert pool.run(2, load, str(memory_path), 1, NEW) == [(new, [])] * 2
    flipped(memory_path / NEW)
    (digest, refused), _ = pool.run(2, load, str(memory_path), 1, NEW)
    assert digest == old and refused[0][0] == NEW
    flipped(memory_path / OLD)
    good, text = pool.outcomes(2, load, str(memory_path), 1, OLD)[1]
    assert not good and OLD in text and NEW not in text.split("no checkpoint in")[-1]
    pool.stop()


def refuse_to_load(rank: Rank, store: str, model: Callable[[], nn.Module], optimizer: Callable[[], Any]) -> str:
    """The sentence with which a load fails."""
    with pytest.raises(NoneUsable) as caught:
        Engine.load(store, built(model), CONFIG, optimizer(), rank.group)
    assert {item.fault for item in caught.value.refused} <= {"unfit"}, "it may be whole"
    return str(caught.value)


def wider() -> nn.Module:
    return tied(width=32)


def frozen_norm() -> nn.Module:
    model = tied()
    model.norm.requires_grad_(False)  # type: ignore[union-attr]
    return model


class Sgd(AdamW):
    """Keeps other state than AdamW."""

    moments = ("momentum",)  # type: ignore[assignment]


def sgd() -> Sgd:
    return Sgd(groups=[{"params": ["*.bias", "*norm.weight"]}])


def test_a_checkpoint_that_does_not_fit_is_refused_by_name(pool: Pool, memory_path: Path) -> None:
    """Another shape, another trainable set, another optimizer: the first difference is named."""
    pool.run(2, save_twice, str(memory_path))
    assert "tokens.weight" in pool.run(2, refuse_to_load, str(memory_path), wider, adamw)[1]
    assert "norm.weight" in pool.run(2, refuse_to_load, str(memory_path), frozen_norm, adamw)[0]
    assert "momentum" in pool.run(2, refuse_to_load, str(memory_path), tied, sgd)[0]


def test_an_empty_store_is_no_fresh_start(pool: Pool, memory_path: Path) -> None:
    """Loading where nothing is never trains from scratch silently."""
    assert "there is no checkpoint" in pool.run(2, refuse_to_load, str(memory_path), tied, adamw)[1]


def save_onto(rank: Rank, root: str, fails: dict[int, FileCalls]) -> tuple[list[str], str]:
    """Step 1 saved well, step 2 with one rank's store broken, then mended: the errors, and the digest in the end."""
    engine = engine_of(rank, CONFIG)
    train(engine, 1)
    engine.save(root, fence=1)
    train(engine, 1)
    problems = []
    try:
        engine.save(LocalStore(root, fails.get(rank.rank)), fence=1)
    except CheckpointError as error:
        problems.append(str(error))
    engine.save(root, fence=1)  # the same step again, into the folder that was left half full
    train(engine, 1)
    engine.save(root, fence=1)
    digest = engine.digest()
    engine.close()
    return problems, digest


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (FullAfter(0), "No space"),
        (FullAfter(3000), "No space"),
        (Denied(), "Read-only"),
        (Denied(errno.EDQUOT), "quota"),
        (Denied(errno.EACCES), "Permission denied"),
    ],
)
def test_a_store_that_fails_on_one_rank_fails_the_save_on_all(
    pool: Pool, memory_path: Path, broken: int, calls: FileCalls, words: str
) -> None:
    """Every rank raises the same sentence, nothing is published; saving again, at once or a step later, is good."""
    outcomes = pool.run(2, save_onto, str(memory_path), {broken: calls})
    for problems, digest in outcomes:
        assert len(problems) == 1 and words in problems[0] and f"rank {broken}" in problems[0]
        assert digest == outcomes[0][1]
    assert [name.step for name in list_checkpoints(LocalStore(memory_path))] == [3, 2, 1]
    assert not list(memory_path.rglob(".tmp-*"))
    assert all(verify(LocalStore(memory_path), name.folder).ok for name in list_checkpoints(LocalStore(memory_path)))


def save_non_finite(rank: Rank, store: str, bad_rank: int, value: float) -> str:
    """The sentence with which saving a broken state fails."""
    engine = engine_of(rank, CONFIG)
    train(engine, 1)
    if rank.rank == bad_rank:
        piece = engine.master.pieces[-1]
        engine.master.tensors(piece.run, piece.range)["exp_avg"][3] = value
    with pytest.raises(CheckpointError) as caught:
        engine.save(store)
    engine.close()
    return str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_never_saved(pool: Pool, memory_path: Path, value: float) -> None:
    """One bad moment on one rank: no checkpoint, and the parameter is named on all ranks."""
    for text in pool.run(2, save_non_finite, str(memory_path), 1, value):
        assert "rank 1: exp_avg of parameter 'blocks.3." in text
    assert list_checkpoints(LocalStore(memory_path)) == ()


def read_bytes(rank: Rank, store: str, stage: int) -> dict[str, int]:
    counting = Counting(store)
    engine = Engine.load(counting, built(tied), ZeroConfig(stage=stage, micro_batches=4, chunk=2), adamw(), rank.group)
    engine.close()
    return counting.bytes_read


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_rank_reads_only_its_own_bytes(pool: Pool, memory_path: Path, stage: int) -> None:
    """Three ranks read what two wrote: together every block exactly once."""
    pool.run(2, save_twice, str(memory_path))
    read = pool.run(3, read_bytes, str(memory_path), stage)
    shards = [(memory_path / NEW / f"rank-{rank:05d}.safetensors").stat().st_size for rank in range(2)]
    together = sum(sum(files.values()) for files in read)
    assert 0 < sum(shards) - together < 10_000, "only the headers are not read"
    assert max(sum(files.values()) for files in read) < 0.45 * together


SHARDS = 13


def save_in_many_shards(rank: Rank, store: str) -> str:
    """The state of one rank, written as thirteen ranks would have written it; its digest."""
    engine = engine_of(rank, CONFIG)
    train(engine, 2)
    subject, local = engine._subject, LocalStore(store)
    draft = replace(draft_of(subject, 2, 1, Progress()), ranks=SHARDS)
    digest = engine.digest()
    for number in range(SHARDS):
        sources = []
        for piece in engine.layout.pieces(number, SHARDS):
            tensors = engine.master.tensors(piece.run, piece.range)
            for run in runs_of(engine.layout, piece, subject.moments):
                tensor = tensors["parameter" if run.kind == MASTER else run.kind]
                size = block_bytes(engine.layout, tensor)
                sources.append(Source(run.kind, DTYPES[tensor.dtype], run.first, size, bytes_of(tensor)))
        part = int(digest, 16) if number == 0 else 0
        put_record(local, draft.folder, Record(write_shard(local, draft.folder, number, sources), part, "t"))
    publish(local, draft, wait_for_records(local, draft.folder, SHARDS, "t", patience_seconds=0))
    engine.close()
    return digest


def test_more_shards_than_readers_have_ranks(pool: Pool, memory_path: Path) -> None:
    """Thirteen shards, some without a block of some unit: 1, 2 and 4 ranks read them; damage in one is named."""
    (digest,) = pool.run(1, save_in_many_shards, str(memory_path))
    for ranks, stage in ((1, 0), (2, 3), (4, 2)):
        assert pool.run(ranks, load, str(memory_path), stage) == [(digest, [])] * ranks
    (name,) = list_checkpoints(LocalStore(memory_path))
    shard = memory_path / name.folder / "rank-00011.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert verify(LocalStore(memory_path), name.folder).bad_ranks == (11,)


def load_vanishing(rank: Rank, store: str, after: int) -> tuple[str, list[tuple[str, str]]]:
    return load(rank, Vanishing(store, after) if rank.rank == 0 else store, stage=0)


def test_a_checkpoint_deleted_while_it_is_read_is_passed_over(pool: Pool, memory_path: Path) -> None:
    """A shard that goes away half-way through a load is a reason to fall back, not a crash."""
    old, _ = pool.run(2, save_twice, str(memory_path))[0]
    for digest, refused in pool.run(2, load_vanishing, str(memory_path), 1):
        assert digest == old and refused[0][0] == NEW


def load_from_afar(rank: Rank, store: str) -> str:
    """Rank 1's store goes away half-way."""
    with pytest.raises(StoreAway) as caught:
        load(rank, Away(store, 1) if rank.rank == 1 else store, stage=0)
    return str(caught.value)


def test_a_store_that_goes_away_is_an_error_on_all_ranks_and_no_fallback(pool: Pool, memory_path: Path) -> None:
    """An outage says nothing about a checkpoint: steps are not given up for it."""
    pool.run(2, save_twice, str(memory_path))
    for text in pool.run(2, load_from_afar, str(memory_path)):
        assert "rank 1" in text and "does not answer" in text


def load_changed(rank: Rank, store: str) -> tuple[str, ...]:
    """What a load says of another arithmetic."""
    config = ZeroConfig(stage=2, micro_batches=2, chunk=1, seed=5)
    engine = Engine.load(store, built(tied), config, adamw(), rank.group)
    engine.close()
    assert engine.loaded is not None
    return engine.loaded.changes


def test_a_load_says_what_lets_the_bits_part(pool: Pool, memory_path: Path) -> None:
    """Another seed, V or C is another run from here on: allowed, and said."""
    pool.run(2, save_twice, str(memory_path))
    said = pool.run(2, load_changed, str(memory_path))[0]
    assert said == ("seed was 1, is 5", "micro_batches was 4, is 2", "chunk was 2, is 1")


def save_again(rank: Rank, store: str) -> tuple[bool, str]:
    """The same step twice, then another state under the same name."""
    engine = engine_of(rank, CONFIG)
    train(engine, 1)
    first = engine.save(store, fence=1)
    second = engine.save(store, fence=1)
    train(engine, 1)
    with pytest.raises(CheckpointError) as caught:
        engine.save(store, step=1, fence=1)
    engine.close()
    return first == second, str(caught.value)


def test_the_same_commit_twice_is_one_checkpoint(pool: Pool, memory_path: Path) -> None:
    """Saving again returns what is there; a published folder is never written again."""
    for same, text in pool.run(2, save_again, str(memory_path)):
        assert same and "already holds another state" in text
    assert len(list_checkpoints(LocalStore(memory_path))) == 1


def save_alone(rank: Rank, store: str) -> str:
    """Rank 0 saves while rank 1 trains."""
    engine = engine_of(rank, ZeroConfig(stage=1, micro_batches=4, chunk=2, transport="shared"))
    try:
        if rank.rank == 0:
            engine.save(store)
        else:
            train(engine, 1)
    except Exception as error:
        engine.close(str(error))
        return f"{type(error).__name__}: {error}"
    return "nothing was noticed"


def test_a_save_that_one_rank_calls_alone_is_an_error_not_a_hang(pool: Pool, memory_path: Path) -> None:
    """The ranks are told that they do different things."""
    said = pool.run(2, save_alone, str(memory_path))
    assert any("DivergedError" in text and "save 0" in text for text in said), said
    pool.stop()


def save_in_the_middle(rank: Rank, store: str) -> list[str]:
    engine = engine_of(rank, CONFIG)
    said = []
    for index in engine.micro_batches():
        for call in (lambda: engine.save(store), lambda: engine.restore(store)):
            with pytest.raises(Exception, match="between steps") as caught:
                call()
            said.append(type(caught.value).__name__)
        engine.backward(engine.module(torch.zeros(1, 3, dtype=torch.int64)).sum() * index)
    engine.step()
    with pytest.raises(Exception, match="plain JSON") as caught:
        engine.save(store, progress=Progress(extra={"loss": float("nan")}))
    engine.close()
    return [*said, type(caught.value).__name__]


def test_misuse_is_named(pool: Pool, memory_path: Path) -> None:
    """Saving or restoring inside a step, or with progress that is not JSON, says what to change."""
    for said in pool.run(2, save_in_the_middle, str(memory_path)):
        assert set(said) == {"UsageError"}
