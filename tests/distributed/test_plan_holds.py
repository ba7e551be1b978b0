"""What the plan says before a run is what the engine takes and sends, to the byte."""

from __future__ import annotations

import random
from itertools import combinations, cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.engine_cases import VOCABULARY, Block, engine_of, mean_loss, tied, train
from tests.distributed.rank_pool import Pool, Rank
from zero_engine import ZeroConfig, plan_of


class Frozen(nn.Module):
    """A frozen embedding, a frozen bias in every block, bf16 beside fp32, a scalar, an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        for block in self.blocks:
            block.up.bias.requires_grad_(False)
            block.adapter = nn.Parameter(torch.randn(16, dtype=torch.bfloat16))
        self.scale, self.nothing = nn.Parameter(torch.ones(())), nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x) * self.scale
        logits: Tensor = self.head(x)
        return logits


def frozen() -> nn.Module:
    return Frozen()


MODELS = {"tied": tied, "frozen": frozen}
SHAPES = ((1, 2, 1), (2, 2, 1), (2, 8, 2), (3, 8, 2), (3, 7, 3), (4, 4, 4))  # N, V, C


def _run(rank: Rank, model: str, config: ZeroConfig) -> dict[str, Any]:
    engine = engine_of(rank, config, MODELS[model])
    train(engine, 2)
    with torch.no_grad():
        mean_loss(engine.module, 0, 0)
    results = train(engine, 1)
    report = {
        "memory": (engine.memory(), engine.plan.memory[rank.rank]),
        "traffic": (engine.ledger().bytes, engine.plan.traffic[rank.rank]),
        "result": (results[-1].bytes, engine.plan.traffic[rank.rank]),
        "pure": (plan_of(engine.layout, config, rank.ranks, transport=engine.comm.name), engine.plan),
    }
    engine.close()
    return report


@pytest.mark.parametrize("transport", ["group", "shared"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_and_traffic_equal_the_plan_to_the_byte(pool: Pool, stage: int, transport: str) -> None:
    """For stages x transports and several (V, C, N), an evaluation between steps; models and precisions in turn."""
    turns = product(MODELS, ("fp32", "bf16"))
    for (ranks, micro_batches, chunk), (model, precision) in zip(SHAPES, cycle(turns), strict=False):
        config = ZeroConfig(stage, micro_batches, chunk, precision, transport=transport, bucket_bytes=4096)
        for rank, report in enumerate(pool.run(ranks, _run, model, config)):
            for what, (measured, planned) in report.items():
                assert measured == planned, f"{what} of rank {rank} of {ranks}, V={micro_batches}, C={chunk}"


SETTINGS: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "ranks": (1, 2, 3, 5),
    "batch": ((8, 1), (8, 3), (8, 8), (5, 2)),  # V, C
    "precision": ("fp32", "bf16", "fp16"),
    "bucket_bytes": (4096, 1 << 16, 4 << 20),
    "offload": ("none", "cpu"),
    "reducer": ("scatter", "naive"),
    "transport": ("shared", "group"),
    "activation_checkpointing": ("none", "full"),
    "model": ("tied", "frozen"),
}


def pairwise_cover(settings: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Rows in which every two values of different settings meet: each has the most new pairs of 50 tries."""
    draw = random.Random(1)
    missing = {((a, x), (b, y)) for a, b in combinations(settings, 2) for x, y in product(settings[a], settings[b])}
    rows = []
    while missing:
        first = min(missing, key=repr)
        tries = [{name: draw.choice(values) for name, values in settings.items()} | dict(first) for _ in range(50)]
        best = max(tries, key=lambda row: len(missing & set(combinations(row.items(), 2))))
        missing -= set(combinations(best.items(), 2))
        rows.append(best)
    return rows


def _holds(pool: Pool, row: dict[str, Any]) -> None:
    chosen = dict(row)
    ranks, model, (micro_batches, chunk) = chosen.pop("ranks"), chosen.pop("model"), chosen.pop("batch")
    config = ZeroConfig(micro_batches=micro_batches, chunk=chunk, **chosen)
    for rank, report in enumerate(pool.run(ranks, _run, model, config)):
        for what, (measured, planned) in report.items():
            assert measured == planned, f"{what} of rank {rank}: {row}"


def test_every_two_settings_together_keep_the_plan(pool: Pool) -> None:
    """Stage, ranks, V, C, precision, bucket, offload, reducer, transport, checkpointing: each pair of values, to the
    byte. Fetching the next unit ahead (stage 3) is always on: it changes when bytes travel, not how many.
    """
    rows = pairwise_cover(SETTINGS)
    assert 16 <= len(rows) < 40
    for row in rows:
        _holds(pool, row)


@pytest.mark.soak
@pytest.mark.parametrize("stage", SETTINGS["stage"])
@pytest.mark.parametrize("ranks", SETTINGS["ranks"])
@pytest.mark.parametrize("batch", SETTINGS["batch"])
def test_the_whole_grid_keeps_the_plan(pool: Pool, stage: int, ranks: int, batch: tuple[int, int]) -> None:
    """Every combination of the settings, to the byte."""
    rest = {name: values for name, values in SETTINGS.items() if name not in ("stage", "ranks", "batch")}
    for values in product(*rest.values()):
        _holds(pool, {"stage": stage, "ranks": ranks, "batch": batch, **dict(zip(rest, values, strict=True))})


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_traffic_at_one_micro_batch_per_rank_is_the_papers(pool: Pool, stage: int) -> None:
    """V = N, fp32: all ranks together send 2 (N-1) P words of gradients and parameters, P padded to whole blocks."""
    for ranks in (2, 3, 4):
        reports = pool.run(ranks, _run, "tied", ZeroConfig(stage, ranks, 1))
        padded = reports[0]["pure"][1].padded_parameters
        sent = [
            sum(count for key, count in report["traffic"][0].items() if key.endswith(("gradients", "parameters")))
            for report in reports
        ]
        assert sum(sent) == 2 * (ranks - 1) * padded * 4


def test_traffic_of_stage_3_is_at_most_the_papers(pool: Pool) -> None:
    """V = N, fp32: at most 3 (N-1) P words, less what the root unit and the standing slots save."""
    for ranks in (2, 3, 4):
        reports = pool.run(ranks, _run, "tied", ZeroConfig(3, ranks, 1))
        padded = reports[0]["pure"][1].padded_parameters
        rows = [report["traffic"][0] for report in reports]
        sent = sum(row["exchange/gradients"] + row["gather/parameters"] for row in rows)
        assert 2 * (ranks - 1) * padded * 4 < sent < 3 * (ranks - 1) * padded * 4
