"""One arithmetic: the whole core (slow, run by `make soak`), and everything around it in pairs."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.delayed_comm import delays
from tests.distributed.engine_cases import adamw, built, tied, train
from tests.distributed.rank_pool import Pool, Rank
from zero_engine import Engine, ZeroConfig
from zero_engine.arenas import Arenas
from zero_engine.reference import Reference

MODEL: dict[str, Any] = {"width": 20, "depth": 5, "dropout": 0.2}
PLAIN: dict[str, Any] = {"micro_batches": 6, "chunk": 2, "gradient_clipping": 0.5}


def _run(rank: Rank, config: ZeroConfig, steps: int) -> str:
    Arenas.fresh_byte = 0xFF
    try:
        engine = Engine(built(tied, **MODEL), config, adamw(), rank.group)
        train(engine, steps)
        assert engine.memory() == engine.plan.memory[rank.rank]
        digest: str = engine.digest()
        engine.close()
    finally:
        Arenas.fresh_byte = 0
    return digest


@functools.cache
def _reference(config: ZeroConfig, steps: int) -> str:
    reference = Reference(built(tied, **MODEL), config, adamw())
    train(reference, steps)
    return reference.digest()


@pytest.mark.soak
@pytest.mark.parametrize("micro_batches", [8, 6])
@pytest.mark.parametrize("chunk", [1, 2, None])
def test_full_core_has_one_digest_per_shape(pool: Pool, micro_batches: int, chunk: int | None) -> None:
    """Stages 0 to 3 x ranks 1 to 5, V = 8 and 6, C = 1, 2, V, clipped, with dropout, ties, odd sizes, NaN-poisoned."""
    numbers: dict[str, Any] = {"micro_batches": micro_batches, "chunk": chunk or micro_batches}
    config = ZeroConfig(**numbers, gradient_clipping=0.5)
    expected = _reference(config, 5)
    for ranks in range(1, 6):
        for stage in range(4):
            digests = set(pool.run(ranks, _run, ZeroConfig(stage, **numbers, gradient_clipping=0.5), 5))
            assert digests == {expected}, f"{ranks} ranks, stage {stage}"


FACTORS: dict[str, tuple[Any, ...]] = {
    "shape": ((2, 1), (3, 3), (4, 2), (5, 0)),  # (ranks, stage)
    "precision": ("fp32", "bf16", "fp16"),
    "activation_checkpointing": ("none", "full", "selective", "every:2"),
    "offload": ("none", "cpu"),
    "bucket_bytes": (4096, 1 << 20),
    "transport": ("group", "shared"),
    "late": (False, True),  # communication comes late, by other amounts on each rank
    "interrupted": (False, True),  # saved after a step, taken up by a new engine
}
Case = dict[str, Any]
Pair = tuple[str, int, str, int]  # two factors, each with the number of a choice


def _pairs(choice: dict[str, int]) -> set[Pair]:
    return {(one, choice[one], other, choice[other]) for one, other in combinations(choice, 2)}


def _cover() -> list[Case]:
    """Few cases in which each choice of each factor meets each choice of every other: greedy, always the same."""
    numbers = product(*(range(len(choices)) for choices in FACTORS.values()))
    every = [(choice, _pairs(choice)) for choice in (dict(zip(FACTORS, each, strict=True)) for each in numbers)]
    left, cases = set[Pair]().union(*(pairs for _, pairs in every)), list[Case]()
    while left:
        best, pairs = max(every, key=lambda each: len(each[1] & left))
        left -= pairs
        cases.append({name: FACTORS[name][number] for name, number in best.items()})
    return cases


def _case(rank: Rank, config: ZeroConfig, late: bool, folder: str) -> str:
    """Three steps; with `folder`, a save after the first and a new engine for the rest."""
    Arenas.fresh_byte = 0xFF
    try:
        with delays(3) if late else nullcontext():
            engine = Engine(built(tied, **MODEL), config, adamw(), rank.group)
            train(engine, 1)
            if folder:
                engine.save(folder)
                engine.close()
                engine = Engine.load(folder, tied(**MODEL), replace(config, broadcast=True), adamw(), rank.group)
            train(engine, 2)
            assert engine.memory() == engine.plan.memory[rank.rank]
            digest: str = engine.digest()
            engine.close()
    finally:
        Arenas.fresh_byte = 0
    return digest


@pytest.mark.parametrize("case", _cover(), ids=lambda case: "-".join(str(value) for value in case.values()))
def test_settings_cover_each_other_in_pairs(pool: Pool, case: Case, memory_path: Path) -> None:
    """Shape, precision, checkpointing, offload, bucket, transport, delays, interruption, on poisoned memory: the bits
    depend on precision alone."""
    settings = dict(case)
    (ranks, stage), late, interrupted = (settings.pop(name) for name in ("shape", "late", "interrupted"))
    config = ZeroConfig(stage, 6, 2, gradient_clipping=0.5, **settings)
    folder = str(memory_path) if interrupted else ""
    expected = _reference(ZeroConfig(**PLAIN, precision=config.precision), 3)
    assert set(pool.run(ranks, _case, config, late, folder)) == {expected}


RANK_PROGRAM = """
import sys
import torch.distributed as dist
from tests.distributed.rank_pool import Rank
from tests.distributed.test_full_core import MODEL, _run
from zero_engine import ZeroConfig
rank, ranks, stage, store = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
digest = _run(Rank(rank, ranks, dist.group.WORLD), ZeroConfig(stage, 6, 2, gradient_clipping=0.5), 3)
print(digest, hash("shardyard"))
dist.destroy_process_group()
"""


def test_another_hash_seed_on_each_rank_changes_no_bit(memory_path: Path, root: Path) -> None:
    """Ranks that order their sets and hash their names differently: one digest."""
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM, str(rank), "2", "3", str(memory_path / "store")],
            env={**os.environ, "PYTHONHASHSEED": str(rank + 1), "PYTHONPATH": str(root)},
            cwd=root,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    words = [program.communicate(timeout=120)[0].split() for program in programs]
    assert len({seed for _, seed in words}) == 2
    assert {digest for digest, _ in words} == {_reference(ZeroConfig(**PLAIN), 3)}
