"""Parameters frozen and unfrozen between steps."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.distributed.engine_cases import Tied, engine_of, reference_of, train
from tests.distributed.rank_pool import Pool, Rank
from zero_engine import ZeroConfig
from zero_engine.errors import DivergedError, PeerError

NUMBERS: dict[str, Any] = {"micro_batches": 4, "chunk": 2, "gradient_clipping": 0.5}


def _changes(trainer: Any) -> list[Any]:
    """Train, freeze a block and half of another, train, unfreeze one of them and freeze the embedding, train."""
    model: nn.Module = trainer.module
    results = train(trainer, 2)
    model.get_submodule("blocks.1").requires_grad_(False)
    model.get_submodule("blocks.3.up").requires_grad_(False)
    results += train(trainer, 2)
    model.get_submodule("blocks.1").requires_grad_(True)
    model.get_submodule("tokens").requires_grad_(False)
    return results + train(trainer, 2)


def _run(rank: Rank, stage: int, precision: str) -> Any:
    engine = engine_of(rank, ZeroConfig(**NUMBERS, stage=stage, precision=precision))
    before = engine.memory()
    results = _changes(engine)
    after = engine.memory()
    assert after == engine.plan.memory[rank.rank] and engine.ledger().bytes == engine.plan.traffic[rank.rank]
    digest = engine.digest()
    engine.close()
    smaller = all(after[name] <= before[name] for name in ("gradients", "sums", "moments", "buckets"))
    return digest, [value for result in results for value in (result.loss, result.grad_norm)], smaller


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_freezing_between_steps_equals_the_plain_loop(pool: Pool, precision: str) -> None:
    """Digest, losses and norms at every stage; memory and traffic follow the plan of the new layout."""
    reference = reference_of(ZeroConfig(**NUMBERS, precision=precision))
    results = _changes(reference)
    expected = (reference.digest(), [value for result in results for value in (result.loss, result.grad_norm)], True)
    for ranks, stage in ((1, 3), (2, 0), (2, 2), (3, 1), (3, 3)):
        assert pool.run(ranks, _run, stage, precision) == [expected] * ranks, f"{ranks} ranks, stage {stage}"


def _half_frozen() -> nn.Module:
    model = Tied()
    model.tokens.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    return model


def _from_the_start(rank: Rank, stage: int) -> str:
    engine = engine_of(rank, ZeroConfig(**NUMBERS, stage=stage, precision="bf16"), _half_frozen)
    train(engine, 2)
    return engine.digest()


def test_what_is_frozen_from_the_start_computes_in_half_precision_too(pool: Pool) -> None:
    reference = reference_of(ZeroConfig(**NUMBERS, precision="bf16"), _half_frozen)
    train(reference, 2)
    for ranks, stage in ((1, 0), (2, 1), (2, 3)):
        assert pool.run(ranks, _from_the_start, stage) == [reference.digest()] * ranks


def _freeze_unlike(rank: Rank, stage: int, transport: str, all_freeze: bool) -> str:
    engine = engine_of(rank, ZeroConfig(**NUMBERS, stage=stage, transport=transport))
    train(engine, 1)
    if all_freeze or rank.rank:
        engine.module.get_submodule(f"blocks.{1 + rank.rank}.up").requires_grad_(False)
    try:
        train(engine, 1)
        return "trained"
    except (DivergedError, PeerError) as error:
        engine.close(str(error))
        return str(error)


@pytest.mark.parametrize("transport", ["group", "shared"])
def test_ranks_that_freeze_other_parameters_are_told(pool: Pool, transport: str) -> None:
    """Layouts of equal sizes would take each other's gradients in silence."""
    for stage in (0, 3):
        for said in pool.run(2, _freeze_unlike, stage, transport, True):
            assert "are blocks.1.up.weight, blocks.1.up.bias on rank 0 and blocks.2.up.weight, blocks.2" in said
        assert all("freezing or unfreezing" in said for said in pool.run(2, _freeze_unlike, stage, transport, False))
