"""fp16 with its loss scale, and activation checkpointing: the same bits at every stage."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.engine_cases import adamw, built, engine_of, mean_loss, reference_of, tied, train
from tests.distributed.rank_pool import Pool, Rank
from zero_engine import Engine, ZeroConfig
from zero_engine.errors import NonFiniteError

NUMBERS: dict[str, Any] = {"micro_batches": 4, "chunk": 2, "gradient_clipping": 0.5}
GRID = [(1, 3), (2, 0), (2, 2), (3, 1), (3, 3)]
FP16: dict[str, Any] = {**NUMBERS, "precision": "fp16", "loss_scale": 2.0**14, "loss_scale_growth": 2}


def _amplified(module: nn.Module, step: int, index: int) -> Tensor:
    """A loss whose scaled gradient overflows fp16 in some steps: 300 times larger in micro-batch 1 of step 1."""
    return mean_loss(module, step, index) * (300.0 if (step, index) == (1, 1) else 1.0)


def _fp16(rank: Rank, stage: int) -> Any:
    engine = engine_of(rank, ZeroConfig(**FP16, stage=stage))
    results = train(engine, 5, _amplified)
    digest, scale = engine.digest(), engine.loss_scale.scale
    assert engine.memory() == engine.plan.memory[rank.rank]
    steps = set(engine.master.steps)
    engine.close()
    return digest, scale, [result.skipped for result in results], [result.grad_norm for result in results], steps


def test_fp16_skips_an_overflow_on_all_ranks_alike(pool: Pool) -> None:
    """One decision for all ranks: steps skipped, scale and digest are the plain loop's; no count moves."""
    reference = reference_of(ZeroConfig(**FP16))
    results = train(reference, 5, _amplified)
    skipped = [result.skipped for result in results]
    assert any(skipped) and not all(skipped)
    for ranks, stage in GRID:
        for digest, scale, skips, norms, steps in pool.run(ranks, _fp16, stage):
            assert (digest, scale, skips) == (reference.digest(), reference.loss_scale.scale, skipped)
            assert [n for n, s in zip(norms, skips, strict=True) if not s] == [
                result.grad_norm for result in results if not result.skipped
            ]
            assert steps == {skips.count(False)}


def _floor(rank: Rank) -> int:
    engine = engine_of(rank, ZeroConfig(2, 4, 2, "fp16", loss_scale=4.0))
    for step in range(9):
        try:
            train(engine, 1, lambda module, step, index: mean_loss(module, step, index) * 1e9)
        except NonFiniteError as error:
            assert "cannot become smaller" in str(error)
            engine.close()
            return step
    return -1


def test_an_endless_overflow_ends_in_an_error(pool: Pool) -> None:
    """4, 2, 1, and then no further: not a loop of skipped steps for ever."""
    assert pool.run(2, _floor) == [2, 2]


class Attention(nn.Module):
    """A block with attention and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        y: Tensor = x + self.drop(self.down(F.gelu(self.up(x))))
        return y


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(31, 16)
        self.blocks = nn.ModuleList(Attention() for _ in range(4))
        self.head = nn.Linear(16, 31)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def gpt() -> nn.Module:
    return Gpt()


def _activations(rank: Rank, stage: int, policy: str) -> str:
    config = ZeroConfig(**NUMBERS, stage=stage, activation_checkpointing=policy)
    engine = Engine(built(gpt), config, adamw(), rank.group)
    train(engine, 3)
    digest = engine.digest()
    assert engine.ledger().bytes == engine.plan.traffic[rank.rank]
    engine.close()
    return digest


@pytest.mark.parametrize("policy", ["full", "selective", "every:2"])
def test_recomputed_activations_keep_the_bits(pool: Pool, policy: str) -> None:
    """With dropout and attention, at every stage: the digest of a loop without checkpointing; no further gathers."""
    reference = reference_of(ZeroConfig(**NUMBERS), gpt)
    train(reference, 3)
    for ranks, stage in GRID:
        assert set(pool.run(ranks, _activations, stage, policy)) == {reference.digest()}, (ranks, stage)


def _saved_bytes(policy: str) -> int:
    """Bytes that autograd keeps for backward of one micro-batch, parameters left out."""
    engine = Engine(built(gpt), ZeroConfig(micro_batches=1, activation_checkpointing=policy), adamw())
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in engine.parameters}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    for index in engine.micro_batches():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = mean_loss(engine.module, 0, index)
        engine.backward(loss)
    engine.step()
    engine.close()
    return sum(kept.values())


def test_full_checkpointing_keeps_only_the_inputs_of_units() -> None:
    """What autograd keeps outside of checkpoints shrinks to less than half."""
    assert _saved_bytes("full") < 0.5 * _saved_bytes("none")
    assert math.isfinite(_saved_bytes("selective")) and tied
