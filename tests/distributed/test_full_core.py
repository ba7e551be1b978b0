"""One arithmetic, the whole core: slow, run by `make soak`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.engine_cases import adamw, built, tied, train
from tests.distributed.rank_pool import Pool, Rank
from zero_engine import Engine, ZeroConfig
from zero_engine.arenas import Arenas
from zero_engine.reference import Reference

MODEL: dict[str, Any] = {"width": 20, "depth": 5, "dropout": 0.2}


def _run(rank: Rank, config: ZeroConfig, steps: int) -> str:
    Arenas.fresh_byte = 0xFF
    try:
        engine = Engine(built(tied, **MODEL), config, adamw(), rank.group)
        train(engine, steps)
        assert engine.memory() == engine.plan.memory[rank.rank]
        digest = engine.digest()
        engine.close()
    finally:
        Arenas.fresh_byte = 0
    return digest


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


PAIRS: list[dict[str, Any]] = [
    {
        "precision": precision,
        "activation_checkpointing": activations,
        "transport": transport,
        "bucket_bytes": size,
        "offload": offload,
    }
    for precision, activations, transport, size, offload in (
        ("bf16", "full", "group", 4096, "none"),
        ("bf16", "none", "shared", 1 << 20, "cpu"),
        ("fp32", "selective", "group", 1 << 20, "cpu"),
        ("fp32", "every:2", "shared", 4096, "none"),
        ("fp32", "none", "group", 4096, "cpu"),
        ("fp16", "full", "shared", 4096, "cpu"),
        ("fp16", "none", "group", 8192, "none"),
    )
]


@pytest.mark.parametrize("settings", PAIRS, ids=lambda settings: "-".join(str(value) for value in settings.values()))
def test_settings_cover_each_other_in_pairs(pool: Pool, settings: dict[str, Any]) -> None:
    """Precision x activation checkpointing x transport x bucket size: each choice with each other's, one digest."""
    numbers: dict[str, Any] = {"micro_batches": 6, "chunk": 2, "gradient_clipping": 0.5, **settings}
    expected = _reference(ZeroConfig(**numbers), 3)
    for ranks, stage in ((2, 1), (3, 3), (4, 2)):
        digests = set(pool.run(ranks, _run, ZeroConfig(**numbers, stage=stage), 3))
        assert digests == {expected}, f"{ranks} ranks, stage {stage}"
