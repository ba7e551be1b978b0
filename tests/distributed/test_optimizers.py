"""Every optimizer is sharded with the same bits, and does what torch.optim does."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.engine_cases import built, mean_loss, tied, train
from tests.distributed.rank_pool import Pool, Rank
from zero_engine import EMA, SGD, Adam, AdamW, ElementWise, Engine, Lion, ZeroConfig
from zero_engine.errors import ConfigError
from zero_engine.reference import Reference


def _adagrad(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.05)


def _adamax(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adamax(parameters, lr=0.01)


MAKERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: AdamW(lr=1e-2),
    "adamw-plain": lambda: AdamW(lr=1e-2, fused=False),
    "adam": lambda: Adam(lr=1e-2, weight_decay=0.1),
    "sgd": lambda: SGD(lr=0.1),
    "momentum": lambda: SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda: SGD(lr=0.1, momentum=0.9, nesterov=True),
    "lion": lambda: Lion(lr=1e-3, weight_decay=0.1),
    "adagrad": lambda: ElementWise(_adagrad),
    "ema": lambda: EMA(AdamW(lr=1e-2), 0.9),
}
TORCH: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw-plain": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def _run(rank: Rank, name: str, stage: int) -> str:
    engine = Engine(built(tied), ZeroConfig(stage, 4, 2, gradient_clipping=0.5), MAKERS[name](), rank.group)
    train(engine, 3)
    assert engine.memory() == engine.plan.memory[rank.rank]
    digest = engine.digest()
    engine.close()
    return digest


@pytest.mark.parametrize("name", MAKERS)
def test_every_optimizer_keeps_its_bits_when_sharded(pool: Pool, name: str) -> None:
    """Stages and ranks agree with the reference loop."""
    reference = Reference(built(tied), ZeroConfig(0, 4, 2, gradient_clipping=0.5), MAKERS[name]())
    train(reference, 3)
    for ranks, stage in ((1, 1), (2, 0), (2, 3), (3, 2)):
        assert set(pool.run(ranks, _run, name, stage)) == {reference.digest()}, (ranks, stage)


@pytest.mark.parametrize("name", TORCH)
def test_one_rank_equals_an_ordinary_pytorch_loop(name: str) -> None:
    """C = V, a power of two, no clipping, one rank: the weights of a plain loop with accumulation, bit for bit."""
    engine = Engine(built(tied), ZeroConfig(2, 4, 4), MAKERS[name]())
    train(engine, 4)
    model = built(tied)
    optimizer = TORCH[name](list(model.parameters()))
    for step in range(4):
        for index in range(4):
            (mean_loss(model, step, index) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for (key, ours), theirs in zip(engine.module.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), key
    engine.close()


def test_one_rank_with_clipping_is_an_ordinary_loop_to_a_millionth() -> None:
    """torch multiplies each gradient by the factor, we the sums once: the weights agree to 1e-6 after clipped steps."""
    engine = Engine(built(tied), ZeroConfig(1, 4, 4, gradient_clipping=0.5), AdamW(lr=1e-3, fused=False))
    assert min(result.grad_norm for result in train(engine, 4)) > 0.5
    model = built(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        for index in range(4):
            (mean_loss(model, step, index) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for (key, ours), theirs in zip(engine.module.named_parameters(), model.parameters(), strict=True):
        assert (ours - theirs).abs().max().item() < 1e-6, key
    engine.close()


def test_ema_equals_an_average_kept_beside_a_plain_loop() -> None:
    """The average starts at the initial weights and follows every update."""
    engine = Engine(built(tied), ZeroConfig(3, 2, 2), EMA(AdamW(lr=1e-2), 0.9))
    average = torch.optim.swa_utils.AveragedModel(
        built(tied), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    average.update_parameters(built(tied))
    shadow = built(tied)
    for _ in range(3):
        train(engine, 1)
        shadow.load_state_dict(engine.full_state_dict())
        average.update_parameters(shadow)
    ema = engine.full_state_dict(kind="ema")
    for key, value in average.module.named_parameters():
        torch.testing.assert_close(ema[key], value, rtol=1e-6, atol=1e-7)
    engine.close()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AdamW(lr=-1.0), "lr is -1.0; use a finite number of at least 0"),
        (lambda: AdamW(lr="1e-3"), "lr is '1e-3'"),  # type: ignore[arg-type]
        (lambda: Adam(eps=math.nan), "eps is nan"),
        (lambda: Adam(betas=(0.9, 1.0)), "betas is (0.9, 1.0); use two numbers from 0 below 1"),
        (lambda: Lion(betas=(0.9,)), "betas is (0.9,)"),  # type: ignore[arg-type]
        (lambda: Lion(weight_decay=math.inf), "weight_decay is inf"),
        (lambda: SGD(momentum=1.0), "momentum is 1.0; use a number from 0 below 1"),
        (lambda: SGD(nesterov=True), "use a momentum"),
        (lambda: AdamW(groups=[{"params": ["*.bias"], "lr": math.nan}]), "lr is nan"),
        (lambda: AdamW(groups=[{"params": ["*.bias"], "decay": 0.0}]), "unknown keys ['decay']; use ['params', "),
        (lambda: AdamW(groups=[{"parms": ["*.bias"]}]), "['parms'] and no \"params\""),
        (lambda: Engine(built(tied), ZeroConfig(), AdamW), "optimizer is the class AdamW"),  # type: ignore[arg-type]
        (
            lambda: Engine(built(tied), ZeroConfig(), AdamW(groups=[{"params": ["*.bias", "body.bais"]}])),
            "group 0 names 'body.bais', which is no parameter",
        ),
    ],
)
def test_settings_that_cannot_train_are_refused_by_name_and_value(make: Callable[[], object], words: str) -> None:
    """As torch.optim does: a rate or decay out of its range would spoil weights silently."""
    with pytest.raises(ConfigError, match=re.escape(words)):
        make()


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1e-3])
def test_a_rate_that_is_no_rate_leaves_the_step_undone(rate: float) -> None:
    """`engine.step(lr=nan)` would make every weight nan; refused, the same step can be made with another rate."""
    engine, other = (Engine(built(tied), ZeroConfig(1, 2, 2), AdamW(lr=1e-2)) for _ in range(2))
    for each in (engine, other):
        for index in each.micro_batches():
            each.backward(mean_loss(each.module, 0, index))
    with pytest.raises(ConfigError, match="lr of a step is"):
        engine.step(lr=rate)
    engine.step(lr=1e-3)
    other.step(lr=1e-3)
    assert engine.digest() == other.digest()
    engine.close()
    other.close()


def test_an_optimizer_that_is_not_element_wise_is_refused() -> None:
    """A norm over the tensor would change with the cut; a state of another shape cannot be sharded."""

    class Normed(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.sub_(parameter.grad / parameter.grad.norm())

    with pytest.raises(ConfigError, match="depends on other elements"):
        ElementWise(lambda p: Normed(p, lr=1.0))
    with pytest.raises(ConfigError, match="no tensor of the parameter's shape"):
        ElementWise(lambda p: torch.optim.LBFGS(p) if len(p) > 9 else torch.optim.Rprop(p, lr=0.1) and _Odd(p))


class _Odd(torch.optim.SGD):
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["whole"] = torch.zeros(1)
