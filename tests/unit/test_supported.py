"""What the engine cannot train is refused by name before it begins; one rank is enough to be told."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.engine_cases import Tied, mean_loss, train
from zero_engine import AdamW, ElementWise, Engine, ZeroConfig
from zero_engine.errors import ConfigError, EngineError, ModelError, UsageError


def _engine(model: nn.Module, **settings: Any) -> Engine:
    return Engine(model, ZeroConfig(**{"micro_batches": 2, "chunk": 1} | settings), AdamW())


def _with_tokens(**settings: Any) -> nn.Module:
    model = Tied()
    model.tokens = nn.Embedding(31, 24, **settings)
    return model


def _lazy() -> nn.Module:
    model = Tied()
    model.extra = nn.LazyLinear(3)
    return model


def _compiled_in_place() -> nn.Module:
    model = Tied()
    model.blocks[2].compile()
    return model


def _compiled() -> nn.Module:
    whole = torch.compile(Tied())
    assert isinstance(whole, nn.Module)
    return whole


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: nn.Sequential(nn.ReLU()), "a Sequential, has no parameters"),
        (lambda: nn.DataParallel(Tied()), "wrapped in DataParallel; give the one inside"),
        (_lazy, "parameter 'extra.weight' has no shape yet"),
        (lambda: _with_tokens(sparse=True), "module 'tokens' makes sparse gradients"),
        (lambda: _with_tokens(max_norm=1.0), "module 'tokens' writes to its weight in forward"),
        (_compiled, "module 'the model' is compiled with unit '_orig_mod.blocks.0' inside"),
        (_compiled_in_place, "module 'blocks.2' is compiled with unit 'blocks.2' inside"),
    ],
)
def test_models_that_cannot_be_trained_are_refused_by_name(model: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        _engine(model(), stage=3)


def test_a_model_is_trained_by_one_engine_at_a_time() -> None:
    """Hooks of two would each take the other's gradients. Closing the first is the way out."""
    model = Tied()
    first = _engine(model)
    for part in (model, model.blocks[0]):
        with pytest.raises(UsageError, match="call close\\(\\) of that one first"):
            _engine(part)
    first.close()
    train(_engine(model), 1)


def test_a_state_that_the_optimizer_does_not_keep_is_no_other() -> None:
    """Weights under the name of an average would be exported as one."""
    engine = _engine(Tied())
    with pytest.raises(ConfigError, match=r"kind is 'ema', .*use one of parameter, exp_avg, exp_avg_sq"):
        engine.full_state_dict(kind="ema")


def test_an_engine_that_was_dropped_makes_room_for_another() -> None:
    """At once, although its parts hold each other until they are collected."""
    model = Tied()
    engine = _engine(model)
    del engine
    train(_engine(model), 1)


def test_weights_that_went_with_an_engine_are_named() -> None:
    model = Tied()
    engine = _engine(model, stage=3)
    engine.close()
    with pytest.raises(ModelError, match=r"weights of parameter 'blocks.0.norm.weight' went with an engine"):
        _engine(model)
    with pytest.raises(UsageError, match="digest needs an open engine"):
        engine.digest()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_copy_of_a_model_with_recomputation_is_its_own(stage: int) -> None:
    """A teacher, say: its blocks are not the trained ones under another name. What a unit had comes back."""
    model, ids = Tied(), torch.arange(4).view(1, 4)
    own = model.blocks[0].forward = functools.partial(model.blocks[0].forward)
    engine = _engine(model, stage=stage, activation_checkpointing="full")
    twin = copy.deepcopy(engine.module)
    before = twin.blocks[1](twin.tokens(ids)).detach()
    train(engine, 1)
    assert torch.equal(before, twin.blocks[1](twin.tokens(ids)))
    assert not torch.equal(before, model.blocks[1](twin.tokens(ids)))
    engine.close()
    assert model.blocks[0].forward is own and "forward" not in vars(model.blocks[1])


class Failing(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError("out of memory, say")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_after_a_backward_that_failed_nothing_is_counted_twice(stage: int) -> None:
    """Some gradients came: an engine cannot tell which, so it refuses to go on."""
    engine = _engine(Tied(), stage=stage)
    for index in engine.micro_batches():
        loss = mean_loss(engine.module, 0, index)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.backward(loss + Failing.apply(next(engine.module.parameters())).sum())
        for again in (lambda: engine.backward(mean_loss(engine.module, 0, 0)), engine.step):
            with pytest.raises(UsageError, match=r"the engine stopped inside a step .*out of memory"):
                again()
        break


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_of_the_loss_itself_is_refused(stage: int) -> None:
    """Its gradients would be neither scaled nor weighted, and its loss not counted."""
    engine = _engine(Tied(), stage=stage)
    with pytest.raises(UsageError, match=r"call that, not loss.backward"):
        for index in engine.micro_batches():
            mean_loss(engine.module, 0, index).backward()


@pytest.mark.parametrize(
    ("loss", "weight", "said"),
    [
        (lambda loss: None, None, "the loss is a NoneType"),
        (lambda loss: loss.item(), None, "the loss is a float"),
        (lambda loss: loss.expand(2), None, r"the loss has shape \(2,\)"),
        (lambda loss: loss.detach(), None, "depends on no parameter that trains"),
        (lambda loss: loss, float("inf"), "the weight of a loss is inf"),
        (lambda loss: loss, -1.0, "the weight of a loss is -1.0"),
    ],
)
def test_losses_without_meaning_are_refused(loss: Callable[[Any], Any], weight: float | None, said: str) -> None:
    engine = _engine(Tied())
    with pytest.raises(UsageError, match=said):
        for index in engine.micro_batches():
            engine.backward(loss(mean_loss(engine.module, 0, index)), weight=weight)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("units", "blocks"), ("gradient_clipping", None), ("loss_scale", "high"), ("seed", 0.5), ("broadcast", 1),
        ("activation_checkpointing", None), ("clip_norm", None), ("micro_batches", 2.0), ("stage", True),
    ],
)  # fmt: skip
def test_settings_of_another_kind_are_named(name: str, value: Any) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=f"^{name} is {value!r}; use "):
        ZeroConfig(**settings)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (lambda p: torch.optim.LBFGS(p), "closure"),
        (lambda p: torch.optim.Muon(p), "only supports 2D"),
        (lambda p: torch.optim.Adafactor(p), "in Adafactor an element's update depends on other elements"),
        (lambda p: torch.optim.ASGD(p), "state 'eta' of ASGD is no tensor"),
    ],
)
def test_optimizers_that_no_shard_can_run_are_refused_by_name(factory: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ElementWise(factory)


def test_a_parameter_named_in_two_groups_is_refused() -> None:
    """By name or by itself; a pattern that fits what an earlier group has is a rule with exceptions."""
    model, weight = Tied(), "blocks.0.up.weight"
    parameter = model.get_parameter(weight)
    for twice, said in ((weight, "'blocks.0.up.weight'"), (parameter, r"a parameter of shape \(73, 24\)")):
        with pytest.raises(ConfigError, match=f"optimizer groups 0 and 2 both have {said}"):
            AdamW(groups=[{"params": [twice]}, {"params": ["*.bias"]}, {"params": [twice]}])
    rule = AdamW(groups=[{"params": [weight]}, {"params": ["*.weight"], "lr": 0.1}])
    assert Engine(model, ZeroConfig(), rule).layout.by_name[weight].spec.group == 0


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(act: Callable[[Engine], Any]) -> None:
    with pytest.raises(UsageError, match="cannot be copied or pickled"):
        act(_engine(Tied()))


def test_what_is_asked_of_a_released_weight_is_named() -> None:
    model = Tied()
    engine = _engine(model, stage=3)
    with pytest.raises(UsageError, match=r"^data: the weights of 'blocks.0.up.weight' are sharded"):
        print(model.blocks[0].up.weight.data)
    engine.close()


@pytest.fixture
def bf16_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_a_program_with_another_default_dtype_trains(bf16_by_default: None) -> None:
    """Masters, sums and states are fp32 whatever torch makes by default."""
    engine = Engine(Tied(), ZeroConfig(3, 2, 1), ElementWise(lambda p: torch.optim.RMSprop(p)))
    train(engine, 2)
    assert len(engine.digest()) == 16


def test_a_flag_that_no_message_can_carry_is_refused() -> None:
    engine = _engine(Tied())
    for index in engine.micro_batches():
        engine.backward(mean_loss(engine.module, 0, index))
    for flag in (-1, 1 << 32):
        with pytest.raises(EngineError, match=f"the flag is {flag}"):
            engine.step(flag=flag)
    assert engine.step(flag=(1 << 32) - 1).flag == (1 << 32) - 1
