"""Parameters smaller than the group, groups of parameters, frozen and shared ones, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.engine_cases import VOCABULARY, Block, Tied, adamw, built, tied, train
from tests.distributed.rank_pool import Pool, Rank
from tests.distributed.test_any_model import Body, plain
from zero_engine import EMA, SGD, AdamW, ElementWise, Engine, ZeroConfig
from zero_engine.adamw import Optimizer
from zero_engine.arenas import Arenas
from zero_engine.errors import ConfigError, DivergedError
from zero_engine.reference import Reference

NUMBERS: dict[str, Any] = {"micro_batches": 5, "chunk": 1, "gradient_clipping": 0.5}


class Tiny(nn.Module):
    """A scalar, a single element, nothing at all: fewer blocks than ranks, so some ranks own nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = ids.unsqueeze(-1) * self.scale + self.shift * torch.arange(VOCABULARY) + self.nothing.sum()
        return logits


def _scale_apart() -> Optimizer:
    """A group that holds one scalar."""
    return AdamW(lr=1e-2, groups=[{"params": ["scale"], "lr": 0.05, "weight_decay": 0.0}])


def _run(
    rank: Rank, model: Callable[..., nn.Module], optimizer: Callable[[], Optimizer], config: ZeroConfig
) -> tuple[str, list[float]]:
    Arenas.fresh_byte = 0xFF
    try:
        engine = Engine(built(model), config, optimizer(), rank.group)
        results = train(engine, 2, plain)
        assert engine.memory() == engine.plan.memory[rank.rank]
        digest = engine.digest()
        engine.close()
    finally:
        Arenas.fresh_byte = 0
    return digest, [result.grad_norm for result in results]


def _expected(
    model: Callable[..., nn.Module], optimizer: Callable[[], Optimizer], config: ZeroConfig
) -> tuple[str, list[float]]:
    reference = Reference(built(model), config, optimizer())
    results = train(reference, 2, plain)
    return reference.digest(), [result.grad_norm for result in results]


def test_ranks_that_own_nothing_take_part_in_everything(pool: Pool) -> None:
    """One scalar, one element and an empty tensor on 3, 4 and 5 ranks: the plain loop's digest and norms."""
    expected = _expected(Tiny, _scale_apart, ZeroConfig(**NUMBERS))
    for ranks, stage in ((3, 0), (4, 1), (4, 2), (5, 2), (4, 3), (5, 3)):
        config = ZeroConfig(stage, **NUMBERS)
        assert pool.run(ranks, _run, Tiny, _scale_apart, config) == [expected] * ranks, f"{ranks} ranks, stage {stage}"


class AdaptedBlock(Block):
    """A frozen bf16 base with an fp32 adapter beside it."""

    def __init__(self) -> None:
        super().__init__(16)
        self.up.to(torch.bfloat16).requires_grad_(False)
        self.adapter = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        base = torch.tanh(self.up(self.norm(x).to(torch.bfloat16))).float()
        y: Tensor = x + self.down(base) + self.adapter(x)
        return y


class Adapted(Body):
    """Two dtypes come in one gather."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AdaptedBlock() for _ in range(4))


class InParts(Body):
    """A program that calls the parts of its blocks and never a block."""

    def body(self, x: Tensor, ids: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.down(torch.tanh(block.up(block.norm(x))))
        return x


def test_parts_of_units_may_be_called_alone_where_weights_stay(pool: Pool) -> None:
    """No hook says when such a unit is done: exact at stages 0 to 2; at stage 3 an error says what to do instead."""
    expected = _expected(InParts, adamw, ZeroConfig(**NUMBERS))
    for ranks, stage in ((2, 0), (3, 1), (1, 2), (2, 2), (3, 2)):
        config = ZeroConfig(stage, **NUMBERS)
        assert pool.run(ranks, _run, InParts, adamw, config) == [expected] * ranks, f"{ranks} ranks, stage {stage}"
    with pytest.raises(AssertionError, match=r"'blocks\.0\.norm\.weight'.* Use them inside their unit's forward"):
        pool.run(1, _run, InParts, adamw, ZeroConfig(3, **NUMBERS))


def test_a_frozen_bf16_base_with_fp32_adapters_trains_exactly(pool: Pool) -> None:
    """Mixed dtypes and mixed requires_grad inside every unit: the plain loop's digest at every stage."""
    expected = _expected(Adapted, adamw, ZeroConfig(**NUMBERS))
    for ranks, stage in ((2, 0), (3, 1), (2, 2), (3, 3)):
        config = ZeroConfig(stage, **NUMBERS)
        assert pool.run(ranks, _run, Adapted, adamw, config) == [expected] * ranks, f"{ranks} ranks, stage {stage}"


def _all_but_one_frozen(rank: Rank, stage: int) -> dict[str, int]:
    model = built(tied).requires_grad_(False)
    model.get_parameter("norm.bias").requires_grad_(True)
    engine = Engine(model, ZeroConfig(stage, 2, 1), adamw(), rank.group)
    train(engine, 1)
    memory = engine.memory()
    engine.close()
    return memory


def test_frozen_weights_have_no_gradient_and_no_optimizer_bytes(pool: Pool) -> None:
    """With one vector of 24 elements left to train, gradients, sums and moments are those of one block."""
    block = 256  # elements, of so small a model
    for stage in range(4):
        for memory in pool.run(2, _all_but_one_frozen, stage):
            assert memory["moments"] <= 2 * 4 * block and memory["master"] == 0
            assert memory["gradients"] + memory["buckets"] + memory["sums"] <= 2 * 4 * block


def test_a_tied_weight_is_counted_once() -> None:
    """In the plan's number of parameters, as `parameters()` counts it."""
    model = built(tied)
    engine = Engine(model, ZeroConfig(micro_batches=1), adamw())
    assert engine.plan.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert model.get_parameter("head.weight") is model.get_parameter("tokens.weight")
    engine.close()


def _two_rates() -> Optimizer:
    return SGD(lr=0.1, groups=[{"params": ["*.bias"], "lr": 0.2}])


def _rates(rank: Rank, rates: list[float] | None) -> dict[str, Tensor]:
    engine = Engine(built(tied), ZeroConfig(2, 2, 1), _two_rates(), rank.group)
    for index in engine.micro_batches():
        engine.backward(plain(engine.module, 0, index))
    engine.step(lr=rates)
    weights = engine.full_state_dict()
    engine.close()
    return weights


@pytest.mark.parametrize("rates", [None, [0.2, 0.1], [0.5, 0.25]])
def test_each_group_keeps_its_own_learning_rate(pool: Pool, rates: list[float] | None) -> None:
    """Biases at 0.2 and the rest at 0.1, or what the call says, group by group: as torch.optim.SGD."""
    model = built(tied)
    torch.stack([plain(model, 0, index) for index in range(2)]).mean().backward()  # type: ignore[no-untyped-call]
    bias, rest = (0.2, 0.1) if rates is None else rates
    for weights in pool.run(2, _rates, rates):
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            expected = parameter.detach() - (bias if name.endswith(".bias") else rest) * parameter.grad
            torch.testing.assert_close(weights[name], expected, rtol=1e-5, atol=1e-7)


def _order_of_groups(rank: Rank) -> str:
    groups = [{"params": ["*.bias"], "lr": 0.2}, {"params": ["*norm.weight"], "lr": 0.3}]
    optimizer = SGD(lr=0.1, groups=groups if rank.rank == 0 else groups[::-1])
    try:
        Engine(built(tied), ZeroConfig(1, 2, 1), optimizer, rank.group)
        return "built"
    except DivergedError as error:
        return str(error)


def test_groups_in_another_order_on_one_rank_are_an_error(pool: Pool) -> None:
    """Not a hang, and not the wrong rate for half of the weights."""
    assert all("groups" in text for text in pool.run(2, _order_of_groups))


def _interleaved() -> Optimizer:
    """Three groups that take turns along the model, fused and not."""
    first = {"params": ["*.up.weight", "*norm.weight"], "lr": 0.02, "fused": False}
    second = {"params": ["*.up.bias", "tokens.weight"], "weight_decay": 0.0, "betas": (0.5, 0.9)}
    return EMA(AdamW(lr=1e-2, groups=[first, second]), 0.9)


def _saved(rank: Rank, stage: int, offload: str, folder: str) -> tuple[str, str]:
    engine = Engine(built(tied), ZeroConfig(stage, **NUMBERS, offload=offload), _interleaved(), rank.group)
    train(engine, 2, plain)
    engine.save(folder)
    digest = engine.digest()
    train(engine, 1, plain)
    end = engine.digest()
    engine.close()
    return digest, end


def _taken_up(rank: Rank, stage: int, offload: str, folder: str) -> tuple[str, str, Tensor]:
    torch.manual_seed(99)  # other first weights: all that is right afterwards came from the checkpoint
    engine = Engine(Tied(), ZeroConfig(stage, **NUMBERS, offload=offload), _interleaved(), rank.group)
    engine.restore(folder)
    digest = engine.digest()
    train(engine, 1, plain)
    end, average = engine.digest(), engine.full_state_dict(kind="ema")["tokens.weight"]
    engine.close()
    return digest, end, average


def test_interleaved_groups_and_an_average_survive_offload_and_reshard(pool: Pool, memory_path: Path) -> None:
    """Saved on 3 ranks with offload, taken up on 2, 1 and 4 at other stages without: equal states, equal next step."""
    (saved, end), *_ = pool.run(3, _saved, 2, "cpu", str(memory_path))
    averages = []
    for ranks, stage, offload in ((2, 3, "none"), (1, 0, "none"), (4, 1, "cpu")):
        for digest, next_digest, average in pool.run(ranks, _taken_up, stage, offload, str(memory_path)):
            assert (digest, next_digest) == (saved, end), f"{ranks} ranks, stage {stage}"
            averages.append(average)
    assert all(torch.equal(average, averages[0]) for average in averages)


def test_a_state_that_is_not_fp32_is_refused() -> None:
    """Whether a shard keeps 8 bits must not depend on its size: every state is fp32 on every number of ranks."""

    class Rounded(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter, dtype=torch.int8)

    with pytest.raises(ConfigError, match="state 'momentum' of Rounded is int8"):
        ElementWise(lambda parameters: Rounded(parameters, lr=0.1))
