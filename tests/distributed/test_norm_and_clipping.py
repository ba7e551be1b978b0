"""One norm for all ranks, each element counted once, and gradients clipped by it as torch clips them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.engine_cases import adamw, built, engine_of, mean_loss, tied, train
from tests.distributed.rank_pool import Pool, Rank
from zero_engine import SGD, Engine, ZeroConfig
from zero_engine.errors import ConfigError, NonFiniteError

NUMBERS: dict[str, Any] = {"micro_batches": 4, "chunk": 2}
RATE = 4096.0  # large, so that little of a clipped gradient is lost when it is subtracted from a weight


def _clipped(rank: Rank, config: ZeroConfig) -> tuple[float, dict[str, Tensor]]:
    """The norm, and the gradients as they were applied: with SGD they are what the weights lost, by the rate."""
    engine = Engine(built(tied), config, SGD(lr=RATE), rank.group)
    before = engine.full_state_dict()
    norm = train(engine, 1)[0].grad_norm
    after = engine.full_state_dict()
    engine.close()
    return norm, {name: (before[name] - after[name]) / RATE for name in before}


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_applied_gradients_are_clipped_as_torch_clips_them(pool: Pool, order: float) -> None:
    """Limit 0.1, at every stage, with offload and without: norm and gradients are those of one plain model."""
    model = built(tied)
    torch.stack([mean_loss(model, 0, index) for index in range(4)]).mean().backward()  # type: ignore[no-untyped-call]
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.1, order)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norms = set[float]()
    for ranks, stage, offload in ((2, 0, "none"), (2, 1, "cpu"), (3, 2, "none"), (4, 3, "cpu")):
        config = ZeroConfig(stage, **NUMBERS, clip_norm=order, gradient_clipping=0.1, offload=offload)
        for norm, applied in pool.run(ranks, _clipped, config):
            norms.add(norm)
            for name, gradient in expected.items():
                torch.testing.assert_close(applied[name], gradient, rtol=1e-4, atol=3e-8)
    assert len(norms) == 1 and norms.pop() == pytest.approx(float(total), rel=1e-5)


def test_only_norms_that_blocks_can_add_up_are_taken() -> None:
    """A 3-norm would need its own power and root: it is refused, not computed wrongly."""
    with pytest.raises(ConfigError, match="clip_norm is 3"):
        ZeroConfig(clip_norm=3.0)


def _in_halves(rank: Rank) -> tuple[float, str] | None:
    """Ranks (0, 1) and (2, 3) of one world train with other data each; rank 4 looks on."""
    halves: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]  # made by all ranks of the world
    if rank.rank == 4:
        return None
    half = rank.rank // 2
    engine = Engine(built(tied), ZeroConfig(2, **NUMBERS, gradient_clipping=0.5), adamw(), halves[half])
    shift = 100 * half
    result = train(engine, 1, lambda module, step, index: mean_loss(module, step + shift, index))[0]
    digest = engine.digest()
    engine.close()
    return result.grad_norm, digest


def test_two_groups_in_one_world_keep_to_themselves(pool: Pool) -> None:
    """Each group has its own norm and state; neither takes part in the other's sums."""
    first, second, third, fourth, _ = pool.run(5, _in_halves)
    assert first == second and third == fourth and first[0] != third[0]


def _norms(rank: Rank, stage: int) -> list[float]:
    engine = engine_of(rank, ZeroConfig(stage, **NUMBERS, precision="bf16", gradient_clipping=0.5))
    norms = [result.grad_norm for result in train(engine, 5)]
    engine.close()
    return norms


def test_stages_give_one_sequence_of_norms_in_bf16(pool: Pool) -> None:
    """Five steps, every stage, every rank: one list of numbers, and none of them is zero."""
    lists = {tuple(norms) for stage in range(4) for norms in pool.run(2, _norms, stage)}
    assert len(lists) == 1 and min(lists.pop()) > 0


def _one_element_infinite(rank: Rank, stage: int, precision: str, policy: str) -> tuple[bool, str, bool]:
    """Micro-batch 3 of step 2 has a finite loss and one infinite gradient element."""
    engine = engine_of(rank, ZeroConfig(stage, **NUMBERS, precision=precision, non_finite=policy))
    train(engine, 1)
    before = engine.digest()

    def loss_of(module: nn.Module, step: int, index: int) -> Tensor:
        loss = mean_loss(module, step, index)
        if index != 3:
            return loss
        weight = module.get_submodule("norm").get_parameter("weight")
        spoiled = torch.where(torch.arange(weight.numel()) == 5, 1e30, 0.0).to(weight.dtype)
        return loss + ((weight - weight.detach()) * spoiled * 1e30).sum().float()

    skipped, text = False, ""
    try:
        skipped = train(engine, 1, loss_of)[0].skipped
    except NonFiniteError as error:
        text = str(error)
    engine.completed_steps -= 1  # the digest holds the number of steps too
    same = engine.digest() == before
    engine.completed_steps += 1
    assert not train(engine, 1)[0].skipped
    engine.close()
    return skipped, text, same


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_infinite_element_stops_or_skips_and_never_reaches_a_weight(pool: Pool, precision: str) -> None:
    """Weights, moments and counts are as before; with the policy "stop" the error names step and parameter."""
    for stage in range(4):
        assert pool.run(2, _one_element_infinite, stage, precision, "skip") == [(True, "", True)] * 2
        for skipped, text, same in pool.run(2, _one_element_infinite, stage, precision, "stop"):
            assert not skipped and same and "step 2" in text and "norm.weight" in text, text
