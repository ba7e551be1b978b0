"""What adds up over micro-batches: token means, late parameters, many small pieces, several backward calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.engine_cases import Tied, adamw, built, engine_of, reference_of, tied, tokens, train
from tests.distributed.rank_pool import Pool, Rank
from zero_engine import SGD, Engine, ZeroConfig

VALID = (1, 7, 3, 5)  # tokens that count, by micro-batch


def _masked(index: int) -> tuple[Tensor, Tensor]:
    """One sequence of which VALID[index] targets count, the others are -100."""
    inputs, targets = tokens(0, index)
    return inputs[:1], torch.where(torch.arange(7) < VALID[index], targets[:1], -100)


def _token_mean(rank: Rank, config: ZeroConfig) -> tuple[float, float, dict[str, Tensor]]:
    engine = Engine(built(tied), config, SGD(lr=1.0), rank.group)
    for index in engine.micro_batches():
        inputs, targets = _masked(index)
        loss = F.cross_entropy(engine.module(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        engine.backward(loss, weight=VALID[index])
    result = engine.step()
    weights = engine.full_state_dict()
    engine.close()
    return result.loss, result.grad_norm, weights


def test_unequal_token_counts_give_the_gradient_of_the_global_mean(pool: Pool) -> None:
    """1, 7, 3 and 5 tokens over 2 ranks: the step of one batch of 16 tokens, and one loss on every rank."""
    model = built(tied)
    parts = [_masked(index) for index in range(4)]
    logits = model(torch.cat([inputs for inputs, _ in parts]))
    loss = F.cross_entropy(logits.flatten(0, 1), torch.cat([targets for _, targets in parts]).flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    for stage in range(4):
        outcomes = pool.run(2, _token_mean, ZeroConfig(stage, 4, 1))
        assert outcomes[0][:2] == outcomes[1][:2] and outcomes[0][0] == pytest.approx(loss.item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(outcomes[0][2][name], parameter.detach() - parameter.grad, rtol=1e-5, atol=1e-7)


class Late(Tied):
    """A second head that only the last micro-batch of a step uses."""

    late = False

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(24, 31)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = (self.extra if self.late else self.head)(self.norm(x))
        return logits


def _late_loss(module: nn.Module, step: int, index: int) -> Tensor:
    module.late = index == 3
    inputs, targets = tokens(step, index)
    return F.cross_entropy(module(inputs).float().flatten(0, 1), targets.flatten())


def _late(rank: Rank, config: ZeroConfig) -> str:
    engine = Engine(built(Late), config, adamw(), rank.group)
    train(engine, 2, _late_loss)
    digest = engine.digest()
    engine.close()
    return digest


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_parameter_may_be_used_first_in_the_last_micro_batch(pool: Pool, precision: str) -> None:
    """Its gradient is exact, and the others do not see it as missing: the plain loop's digest at every stage."""
    numbers: dict[str, Any] = {"micro_batches": 4, "chunk": 2, "precision": precision, "gradient_clipping": 0.5}
    reference = reference_of(ZeroConfig(**numbers), Late)
    train(reference, 2, _late_loss)
    for ranks, stage in ((1, 1), (2, 0), (2, 2), (3, 3)):
        assert set(pool.run(ranks, _late, ZeroConfig(stage, **numbers))) == {reference.digest()}, (ranks, stage)


class OneWeight(nn.Module):
    """64 weights whose gradient is what the micro-batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.weight * x).sum()
        return y


def _uneven(index: int) -> Tensor:
    """One large gradient among 63 small ones, each exact in bf16."""
    return torch.full((64,), 256.0 if index == 0 else 2.0**-7)


def _many(rank: Rank, config: ZeroConfig) -> Tensor:
    engine = Engine(built(OneWeight), config, SGD(lr=64.0), rank.group)
    train(engine, 1, lambda module, step, index: module(_uneven(index)))
    weight = engine.full_state_dict()["weight"]
    engine.close()
    return weight


@pytest.mark.parametrize(("ranks", "stage", "chunk"), [(1, 0, 64), (2, 0, 32), (2, 2, 1), (4, 3, 8)])
def test_sixty_four_bf16_pieces_add_up_in_fp32(pool: Pool, ranks: int, stage: int, chunk: int) -> None:
    """256 + 63 / 128 is exact in fp32; a sum kept in bf16 would lose every small piece."""
    for weight in pool.run(ranks, _many, ZeroConfig(stage, 64, chunk, "bf16")):
        assert weight.tolist() == [-(256 + 63 / 128)] * 64


def _four_calls(trainer: Any, steps: int) -> None:
    for step in range(trainer.completed_steps, trainer.completed_steps + steps):
        for index in trainer.micro_batches():
            for part in range(4):
                inputs, targets = tokens(step, 4 * index + part)
                loss = F.cross_entropy(trainer.module(inputs).float().flatten(0, 1), targets.flatten())
                trainer.backward(loss, last=part == 3)
        trainer.step()


def _several(rank: Rank, config: ZeroConfig) -> str:
    engine = engine_of(rank, config)
    planned = engine.plan.memory[rank.rank]["gradients"]
    _four_calls(engine, 2)
    assert engine.memory() == engine.plan.memory[rank.rank] and engine.memory()["gradients"] > planned
    assert engine.ledger().bytes["exchange/gradients"] == engine.plan.traffic[rank.rank]["exchange/gradients"]
    digest = engine.digest()
    engine.close()
    return digest


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_four_backward_calls_of_one_micro_batch_are_its_sum(pool: Pool, offload: str, precision: str) -> None:
    """None is lost, with offload neither; the piece's bytes stand in the plan, and its gradient travels once."""
    numbers: dict[str, Any] = {"micro_batches": 2, "chunk": 1, "precision": precision}
    reference = reference_of(ZeroConfig(**numbers))
    _four_calls(reference, 2)
    for stage in range(4):
        config = ZeroConfig(stage, **numbers, offload=offload)
        assert set(pool.run(2, _several, config)) == {reference.digest()}, stage


class WithBuffers(Tied):
    """Buffers of three dtypes, one of them other on every rank, and one that takes part in forward."""

    def __init__(self, own: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0, 1, 24) * 1.0000001)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("own", torch.full((2,), own, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.frequencies.to(self.tokens.weight.dtype)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _buffers(rank: Rank, stage: int, precision: str) -> list[str]:
    model = built(WithBuffers, own=float(rank.rank))
    before = {name: (buffer.data_ptr(), buffer.dtype, buffer.clone()) for name, buffer in model.named_buffers()}
    engine = Engine(model, ZeroConfig(stage, 4, 2, precision), adamw(), rank.group)
    train(engine, 2)
    changed = [
        name
        for name, buffer in model.named_buffers()
        if (buffer.data_ptr(), buffer.dtype) != before[name][:2] or not torch.equal(buffer, before[name][2])
    ]
    engine.close()
    return changed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_buffers_are_neither_cast_nor_sent(pool: Pool, precision: str) -> None:
    """Same memory, dtype and values on each rank, also where the values differ between ranks."""
    for stage in range(4):
        assert pool.run(2, _buffers, stage, precision) == [[], []]
