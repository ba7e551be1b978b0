"""Resume on other ranks, another stage, with or without offload: the bits of one run, each rank reading its own part.

Six kinds of ranks x four stages x offload make 48 shapes; from each to each is a soak. What runs always holds every
number of ranks, stage and offload at least once on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest

from tests.distributed.attempts import Attempt
from tests.distributed.checkpoint_faults import Counting
from tests.distributed.engine_cases import adamw, built, engine_of, reference_of, tied, train
from tests.distributed.rank_pool import Pool, Rank
from workers.contract import ResumeFrom
from workers.schedule import learning_rate
from workers.spec import read_spec_file
from zero_engine import Engine, ZeroConfig
from zero_engine.catalog import list_checkpoints, verify
from zero_engine.reshard import bytes_to_read
from zero_engine.store import LocalStore

CONFIG = ZeroConfig(micro_batches=8, chunk=2, gradient_clipping=0.5)
BEFORE, AFTER = 2, 2  # steps
RANKS, STAGES, OFFLOAD = (1, 2, 3, 4, 6, 8), (0, 1, 2, 3), ("none", "cpu")


@dataclass(frozen=True)
class Shape:
    """How a run is laid out; none of it may change a bit."""

    ranks: int
    stage: int
    offload: str

    @property
    def config(self) -> ZeroConfig:
        return replace(CONFIG, stage=self.stage, offload=self.offload)

    @property
    def folder(self) -> str:
        return f"{self.ranks}-{self.stage}-{self.offload}"


SOME = (
    Shape(1, 0, "none"), Shape(2, 1, "cpu"), Shape(3, 2, "none"), Shape(4, 0, "cpu"), Shape(6, 2, "cpu"),
    Shape(8, 3, "none"),
)  # fmt: skip
ALL = tuple(Shape(*shape) for shape in product(RANKS, STAGES, OFFLOAD))


def saved(rank: Rank, shape: Shape, store: str) -> str:
    """Train and save; the digest."""
    engine = engine_of(rank, shape.config, dropout=0.1)
    train(engine, BEFORE)
    digest: str = engine.save(store, fence=1).digest
    engine.close()
    return digest


def resumed(rank: Rank, shape: Shape, stores: list[str]) -> list[tuple[str, str, list[float], int]]:
    """From each store: the digest as loaded, the digest and losses after training on, and bytes read."""
    found = []
    for store in stores:
        model = built(tied, dropout=0.1)
        for parameter in model.parameters():
            parameter.data.fill_(7.0)  # nothing of a fresh model may survive the load
        counting = Counting(store)
        engine = Engine.load(counting, model, shape.config, adamw(), rank.group)
        read = sum(counting.bytes_read.values())
        assert read == bytes_to_read(engine.layout, ("exp_avg", "exp_avg_sq"), rank.ranks, shape.stage)[rank.rank]
        loaded = engine.digest()
        results = train(engine, AFTER)
        found.append((loaded, engine.digest(), [result.loss for result in results], read))
        engine.close()
    return found


def each_reads(pool: Pool, root: Path, shapes: tuple[Shape, ...], offsets: Sequence[int]) -> None:
    """Each shape saves; each resumes from those that stand so many places further on in the list."""
    reference = reference_of(CONFIG, dropout=0.1)
    train(reference, BEFORE)
    begun = reference.digest()
    losses = [result.loss for result in train(reference, AFTER)]
    ended = reference.digest()
    for shape in shapes:
        assert pool.run(shape.ranks, saved, shape, str(root / shape.folder)) == [begun] * shape.ranks, shape
    for number, shape in enumerate(shapes):
        stores = [str(root / shapes[(number + offset) % len(shapes)].folder) for offset in offsets]
        outcomes = pool.run(shape.ranks, resumed, shape, stores)
        for found in outcomes:
            assert [result[:3] for result in found] == [(begun, ended, losses)] * len(stores), shape
        reads = {tuple(found[place][3] for found in outcomes) for place in range(len(stores))}
        assert len(reads) == 1, "what a rank reads depends on the reader alone, not on who wrote"


def test_runs_of_one_to_eight_ranks_resume_from_each_other(wide_pool: Pool, memory_path: Path) -> None:
    """All stages, offload on and off: one digest, and each rank reads exactly the bytes of the plan."""
    each_reads(wide_pool, memory_path, SOME, (1, 3))


@pytest.mark.soak
def test_every_shape_resumes_as_every_other_without_exception(wide_pool: Pool, memory_path: Path) -> None:
    """All 48 x 48."""
    each_reads(wide_pool, memory_path, ALL, range(len(ALL)))


SCHEDULE = "train.schedule={kind: cosine, warmup_steps: 2, min_lr: 1.0e-5}"
EPOCHS = ["train.global_batch=512", "train.micro_batch=128", "train.steps=9", SCHEDULE, "checkpoint.every=4"]


@dataclass(frozen=True)
class Seen:
    """What one rank saw of an attempt."""

    outcome: str
    digest: str
    samples: dict[tuple[int, int], str]
    rates: dict[int, float]


def attempted(
    rank: Rank, root: str, stage: int, fence: int, until: int | None, start: str | None, steps: int = 9
) -> Seen:
    """One attempt; `start`: the folder it resumes from."""
    resume = None if start is None else ResumeFrom(checkpoint=start, step=0)
    changes = [*EPOCHS, f"zero.stage={stage}", f"train.steps={steps}", "train.chunk=2"]
    attempt = Attempt(rank, root, changes, fence=fence, resume=resume, until=until)
    outcome = attempt.run()
    points = [record for record in attempt.told("points") if "lr" in record["values"]]
    return Seen(outcome, attempt.digest, attempt.samples, {p["step"]: p["values"]["lr"] for p in points})


def together(seen: list[Seen]) -> tuple[dict[tuple[int, int], str], dict[int, float]]:
    """Samples and rates of all ranks."""
    samples: dict[tuple[int, int], str] = {}
    for one in seen:
        samples |= one.samples
    return samples, seen[0].rates


def newest(root: Path) -> str:
    return list_checkpoints(LocalStore(root / "store"))[0].folder


def test_two_resumes_across_the_ends_of_epochs_are_one_run(pool: Pool, memory_path: Path) -> None:
    """Digits hold 3.5 steps of 512: the epoch ends inside the first and the last attempt. Sample by sample and rate by
    rate the three attempts are the uninterrupted run; another resume after the last step makes none.
    """
    whole = pool.run(2, attempted, str(memory_path / "whole"), 2, 1, None, None)
    samples, rates = together(whole)
    assert len(samples) == 9 * 4 and len(set(rates.values())) > 5
    root = memory_path / "parts"
    parts = pool.run(2, attempted, str(root), 2, 1, 4, None)
    for ranks, stage, fence, until in ((3, 3, 2, 7), (1, 0, 3, None)):
        parts += pool.run(ranks, attempted, str(root), stage, fence, until, newest(root))
    joined = together(parts)[0]
    assert joined == samples, "the same samples at the same places"
    assert {step: rate for part in parts for step, rate in part.rates.items()} == rates
    assert [part.outcome for part in parts] == ["stopped"] * 5 + ["finished"]
    assert parts[-1].digest == whole[0].digest
    (again,) = pool.run(1, attempted, str(root), 1, 4, None, newest(root))
    assert (again.outcome, again.samples, again.digest) == ("finished", {}, whole[0].digest)


def test_more_steps_than_before_go_on_along_the_longer_schedule(pool: Pool, memory_path: Path) -> None:
    """`train.steps` raised on a resume: the first new step takes the rate that a run of that length has there."""
    pool.run(2, attempted, str(memory_path), 1, 1, None, None)
    longer = pool.run(2, attempted, str(memory_path), 2, 2, None, newest(memory_path), 12)
    spec = read_spec_file(memory_path / "rank-0-2" / "spec.yaml", [*EPOCHS, "train.steps=12"])
    assert longer[0].outcome == "finished"
    assert longer[0].rates == {step: learning_rate(spec.train, step - 1) for step in (10, 11, 12)}
    store = LocalStore(memory_path / "store")
    assert list_checkpoints(store)[0].step == 12 and verify(store, newest(memory_path)).ok


def refused(rank: Rank, root: str, start: str) -> dict[str, bool]:
    """An attempt that can begin from nothing: whether each checkpoint that it names is damaged."""
    attempt = Attempt(rank, root, [], fence=9, resume=ResumeFrom(checkpoint=start, step=0))
    assert attempt.run().startswith("RestoreError")
    return {event["data"]["folder"]: event["data"]["damaged"] for event in attempt.events("checkpoint.refused")}


def test_what_was_read_and_found_wrong_is_damaged_and_what_is_out_of_sight_is_not(
    pool: Pool, memory_path: Path
) -> None:
    """A store where nothing is may be a disk that is not mounted; where anything is, one that is missing is gone."""
    torn, gone = "step-0000000001-attempt-000001", "step-0000000002-attempt-000001"
    assert pool.run(2, refused, str(memory_path / "empty"), gone) == [{gone: False}, {}]
    LocalStore(memory_path / "card" / "store").put("job.json", b"{}")
    assert pool.run(2, refused, str(memory_path / "card"), gone) == [{gone: True}, {}]
    store = LocalStore(memory_path / "torn" / "store")
    store.put(f"{torn}/manifest.json", b"{")
    assert pool.run(2, refused, str(memory_path / "torn"), gone) == [{gone: True, torn: True}, {}]
