"""What the engine does beyond plain training: several backwards, weights, evaluation, errors, policies."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.engine_cases import (
    Block,
    Tied,
    adamw,
    built,
    engine_of,
    mean_loss,
    reference_of,
    tied,
    tokens,
    train,
)
from tests.distributed.rank_pool import Pool, Rank
from tests.waiting import stretched
from zero_engine import EMA, AdamW, ElementWise, Engine, ZeroConfig
from zero_engine.errors import DivergedError, EngineError, ModelError, NonFiniteError, PeerError, UsageError

NUMBERS: dict[str, Any] = {"micro_batches": 6, "chunk": 2, "gradient_clipping": 0.5}
GRID = [(1, 3), (2, 0), (2, 2), (3, 1), (3, 3)]


def _two_backwards(trainer: Any, steps: int) -> list[Any]:
    """Two losses per micro-batch, of one forward for odd numbers, of two for even."""
    results = []
    for step in range(steps):
        for index in trainer.micro_batches():
            inputs, targets = tokens(step, index)
            logits = trainer.module(inputs)
            trainer.backward(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), False, None, index % 2 == 1)
            again = logits if index % 2 else trainer.module(inputs.flip(0))
            trainer.backward(again.float().square().mean() * 0.1)
        results.append(trainer.step())
    return results


def _weighted(trainer: Any, steps: int) -> list[Any]:
    """Sums of losses over different numbers of tokens."""
    results = []
    for step in range(steps):
        for index in trainer.micro_batches():
            inputs, targets = tokens(step, index)
            count = 1 + (step + 3 * index) % 7
            logits = trainer.module(inputs[:, :count])
            loss = F.cross_entropy(logits.flatten(0, 1), targets[:, :count].flatten(), reduction="sum")
            trainer.backward(loss, weight=targets[:, :count].numel())
        results.append(trainer.step())
    return results


def _disturbed(trainer: Any, steps: int) -> list[Any]:
    """Evaluation between steps and inside micro-batches, forwards that raise half-way, a forward too many."""
    results = []
    for step in range(steps):
        for index in trainer.micro_batches():
            with pytest.raises(RuntimeError, match="on purpose"):
                _raising_forward(trainer.module, step, index)
            loss = mean_loss(trainer.module, step, index)
            with torch.no_grad():
                mean_loss(trainer.module, 99, index)
            trainer.backward(loss)
        results.append(trainer.step())
        trainer.module.eval()
        with torch.no_grad():
            mean_loss(trainer.module, step, 0)
        trainer.module.train()
    return results


def _adversarial(trainer: Any, steps: int) -> list[Any]:
    """A gradient of what the blocks are given, for another such input, before the backward of the micro-batch."""
    results, model = [], trainer.module

    def loss_of(x: Tensor, targets: Tensor) -> Tensor:
        for block in model.blocks:
            x = block(x)
        return F.cross_entropy(model.head(model.norm(x)).float().flatten(0, 1), targets.flatten())

    for step in range(steps):
        for index in trainer.micro_batches():
            inputs, targets = tokens(step, index)
            x = model.tokens(inputs).detach().requires_grad_()
            (direction,) = torch.autograd.grad(loss_of(x, targets), x)
            trainer.backward(loss_of(model.tokens(inputs) + 0.1 * direction.sign(), targets))
        results.append(trainer.step())
    return results


def _raising_forward(module: nn.Module, step: int, index: int) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    handle = module.get_submodule("blocks.2.up").register_forward_hook(fail)
    try:
        mean_loss(module, step, index)
    finally:
        handle.remove()


def _run(rank: Rank, config: ZeroConfig, loop: Callable[[Any, int], list[Any]]) -> Any:
    engine = engine_of(rank, config)
    results = loop(engine, 3)
    assert engine.memory() == engine.plan.memory[rank.rank]
    digest = engine.digest()
    engine.close()
    return digest, [value for result in results for value in (result.loss, result.grad_norm)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "loop", [_two_backwards, _weighted, _disturbed, _adversarial], ids=lambda loop: loop.__name__[1:]
)
def test_unusual_loops_equal_the_plain_loop(pool: Pool, loop: Callable[[Any, int], list[Any]], precision: str) -> None:
    """Several backward calls, token weights, evaluation and exceptions in between: the same bits as the reference."""
    reference = reference_of(ZeroConfig(**NUMBERS, precision=precision))
    results = (train if loop is _disturbed else loop)(reference, 3)
    expected = (reference.digest(), [value for result in results for value in (result.loss, result.grad_norm)])
    for ranks, stage in GRID:
        config = ZeroConfig(**NUMBERS, stage=stage, precision=precision)
        assert pool.run(ranks, _run, config, loop) == [expected] * ranks, f"{ranks} ranks, stage {stage}"


def test_token_weights_give_the_gradient_of_the_global_mean(pool: Pool) -> None:
    """Loss and norm equal those of one batch of all tokens in plain PyTorch, to rounding."""
    model = built(tied)
    losses = []
    for index in range(6):
        inputs, targets = tokens(0, index)
        count = 1 + 3 * index % 7
        logits = model(inputs[:, :count])
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets[:, :count].flatten(), reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    _, numbers = pool.run(2, _run, ZeroConfig(**NUMBERS, stage=2), _weighted)[0]
    assert numbers[:2] == pytest.approx([loss.item(), norm.item()], rel=1e-5)


def _norms(rank: Rank, config: ZeroConfig) -> tuple[float, str]:
    engine = engine_of(rank, config)
    result = train(engine, 1)[0]
    digest = engine.digest()
    engine.close()
    return result.grad_norm, digest


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_clipping_by_any_norm_is_torchs(pool: Pool, order: float) -> None:
    """The 1-, 2- and inf-norm of the mean gradient as torch computes them; one digest over stages."""
    model = built(tied)
    loss = torch.stack([mean_loss(model, 0, index) for index in range(6)]).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], order)
    config = {**NUMBERS, "clip_norm": order, "gradient_clipping": float(norm) / 3}
    answers = {pool.run(ranks, _norms, ZeroConfig(**config, stage=stage))[0] for ranks, stage in GRID}
    assert len(answers) == 1
    assert answers.pop()[0] == pytest.approx(float(norm), rel=1e-5)


class WithBatchNorm(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(24)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.batch_norm(self.tokens(ids).flatten(0, 1)).view(*ids.shape, -1)
        logits: Tensor = self.head(self.norm(x))
        return logits


class WithCache(Tied):
    """Fills a buffer in the first forward, and reads it afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", None)

    def forward(self, ids: Tensor) -> Tensor:
        if self.positions is None:
            self.positions = torch.arange(64)
        logits: Tensor = super().forward(ids) + self.positions[: ids.shape[1]].view(1, -1, 1)
        return logits


class WithAverage(Tied):
    """Puts another tensor in the place of a buffer, instead of writing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(24))

    def forward(self, ids: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * self.tokens(ids).detach().mean((0, 1))
        logits: Tensor = super().forward(ids)
        return logits


def _changing(rank: Rank, model: type[nn.Module], buffers: str) -> str:
    engine = Engine(built(model), ZeroConfig(1, 6, 2, buffers=buffers), adamw(), rank.group)
    try:
        train(engine, 1)
        return "trained"
    except ModelError as error:
        return str(error)
    finally:
        engine.close()


@pytest.mark.parametrize(("model", "name"), [(WithBatchNorm, "batch_norm."), (WithAverage, "average'")])
def test_buffers_that_training_changes_are_refused_by_name(pool: Pool, model: type[nn.Module], name: str) -> None:
    """At N > 1 unless buffers="local"; at N = 1 there is nothing to differ from."""
    assert all(f"buffer '{name}" in text for text in pool.run(2, _changing, model, "refuse"))
    assert pool.run(2, _changing, model, "local") == ["trained"] * 2
    assert pool.run(1, _changing, model, "refuse") == ["trained"]
    assert pool.run(2, _changing, WithCache, "refuse") == ["trained"] * 2


def _poisoned(rank: Rank, stage: int, policy: str) -> Any:
    engine = engine_of(rank, ZeroConfig(stage, 6, 2, non_finite=policy))
    train(engine, 1)
    before = engine.digest_part()

    def loss_of(module: nn.Module, step: int, index: int) -> Tensor:
        return mean_loss(module, step, index) * (math.inf if index == 4 else 1.0)

    try:
        skipped = train(engine, 1, loss_of)[0].skipped
        text = ""
    except NonFiniteError as error:
        skipped, text = True, str(error)
    states = [engine.master.tensors(p.run, p.range)["parameter"].isfinite().all().item() for p in engine.master.pieces]
    steps = list(engine.master.steps)
    after = train(engine, 1)[0]
    engine.close()
    return skipped, text, all(states), set(steps), after.skipped, before != 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_that_is_not_finite_changes_nothing(pool: Pool, stage: int) -> None:
    """Skip: nothing moves and the next step works. Stop: an error that names the micro-batch."""
    assert pool.run(2, _poisoned, stage, "skip") == [(True, "", True, {1}, False, True)] * 2
    for skipped, text, finite, counts, again, _ in pool.run(2, _poisoned, stage, "stop"):
        assert (skipped, finite, counts, again) == (True, True, {1}, False)
        assert "micro-batch 4" in text and "step 2" in text


def _different(rank: Rank, broadcast: bool) -> str:
    torch.manual_seed(rank.rank)
    model = Tied()
    try:
        engine = Engine(model, ZeroConfig(1, 6, 2, broadcast=broadcast), adamw(), rank.group)
    except DivergedError as error:
        return str(error)
    train(engine, 1)
    digest = engine.digest()
    engine.close()
    return digest


def test_different_initial_weights_are_named_or_broadcast(pool: Pool) -> None:
    """The first parameter that differs stands in the error; with broadcast=True rank 0's are used."""
    assert all("'tokens.weight'" in text for text in pool.run(2, _different, False))
    assert len(set(pool.run(2, _different, True))) == 1


def _one_raises(rank: Rank, stage: int, transport: str, where: str) -> tuple[float, str]:
    engine = engine_of(rank, ZeroConfig(stage, 6, 2, transport=transport))
    train(engine, 1)
    start = time.monotonic()
    try:
        for index in engine.micro_batches():
            if rank.rank == 1 and where == "data" and index > 1:
                raise ValueError("no such sample")
            if rank.rank == 1 and where == "forward" and index > 1:
                _raising_forward(engine.module, 1, index)
            engine.backward(mean_loss(engine.module, 1, index))
        engine.step()
        return time.monotonic() - start, "no error"
    except (PeerError, ValueError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
    engine.close(text)
    return time.monotonic() - start, text


@pytest.mark.parametrize("where", ["data", "forward"])
@pytest.mark.parametrize("transport", ["group", "shared"])
@pytest.mark.parametrize("stage", [1, 3])
def test_one_rank_that_raises_ends_all_within_ten_seconds(pool: Pool, stage: int, transport: str, where: str) -> None:
    """The others fail with its rank, its error, and for an error in forward the module."""
    outcomes = pool.run(3, _one_raises, stage, transport, where)
    assert all(seconds < stretched(10) for seconds, _ in outcomes)
    for rank in (0, 2):
        text = outcomes[rank][1]
        assert text.startswith("PeerError: rank 1 failed"), text
        assert ("on purpose" in text and "blocks.2" in text) if where == "forward" else "no such sample" in text
    pool.stop()


class AnyOrder(Tied):
    """Runs its blocks forwards or backwards."""

    backwards = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in reversed(self.blocks) if self.backwards else self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _order_differs(rank: Rank, stage: int, transport: str) -> str:
    engine = engine_of(rank, ZeroConfig(stage, 2, 1, transport=transport), AnyOrder)
    engine.module.backwards = rank.rank == 1
    try:
        train(engine, 1)
        return "no error"
    except (DivergedError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.close("diverged")


@pytest.mark.parametrize("transport", ["group", "shared"])
@pytest.mark.parametrize("stage", [2, 3])
def test_diverging_control_flow_is_an_error_that_names_the_modules(pool: Pool, stage: int, transport: str) -> None:
    """Ranks that run their blocks in another order are told so, and where each of them is."""
    texts = pool.run(2, _order_differs, stage, transport)
    assert any("DivergedError" in text and "blocks.0" in text and "blocks.3" in text for text in texts), texts
    pool.stop()


class LayerDrop(Tied):
    """Blocks of unlike sizes, of which a micro-batch runs some, as chance has it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(Block(24) for _ in range(1 + number))) for number in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            if torch.rand(()) < 0.5:
                x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _drop_layers(rank: Rank, transport: str) -> str:
    engine = engine_of(rank, ZeroConfig(3, 6, 2, transport=transport), LayerDrop)
    try:
        train(engine, 3)
        return engine.digest()
    except (DivergedError, PeerError) as error:
        engine.close(str(error))
        return f"{type(error).__name__}: {error}"


def test_ranks_that_skip_different_units_are_exact_or_told_so(pool: Pool) -> None:
    """Where bytes are read in place nobody need come to the same unit; messages between ranks need two sides."""
    reference = reference_of(ZeroConfig(3, 6, 2), LayerDrop)
    train(reference, 3)
    assert pool.run(3, _drop_layers, "shared") == [reference.digest()] * 3
    texts = pool.run(3, _drop_layers, "group")
    assert any("DivergedError" in text and "weights of blocks." in text for text in texts), texts
    assert all("Error: rank" in text for text in texts), texts
    pool.stop()


def _digest_alone(rank: Rank, stage: int) -> str:
    engine = engine_of(rank, ZeroConfig(stage, 2, 1))
    train(engine, 1)
    try:
        engine.digest() if rank.rank == 0 else train(engine, 1)
    except (DivergedError, PeerError) as error:
        engine.close(str(error))
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("stage", [1, 3])
def test_a_digest_that_one_rank_takes_alone_is_an_error(pool: Pool, stage: int) -> None:
    """What `if rank == 0:` around a collective call comes to: named on both sides, no endless wait."""
    texts = pool.run(2, _digest_alone, stage)
    assert all("'digest'" in text and "gradients" in text for text in texts), texts


def _killed(rank: Rank, transport: str) -> str:
    engine = engine_of(rank, ZeroConfig(1, 6, 2, transport=transport))
    train(engine, 1)
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        train(engine, 1)
        return "no error"
    except PeerError as error:
        return str(error)


@pytest.mark.parametrize("transport", ["group", "shared"])
def test_a_rank_that_is_killed_is_named_by_all_others(pool: Pool, transport: str) -> None:
    """kill -9 is seen at once, not after a time-out; those who hear of it from another rank say the same rank."""
    outcomes = pool.outcomes(3, _killed, transport)
    pool.stop()
    assert all(outcomes[rank][0] and outcomes[rank][1].startswith("rank 1 failed: ") for rank in (0, 2)), outcomes


def _misuse(rank: Rank) -> list[str]:
    engine = engine_of(rank, ZeroConfig(0, 2, 1))
    texts = []

    def catch(action: Callable[[], Any]) -> None:
        try:
            action()
        except EngineError as error:
            texts.append(f"{error.code}: {error}")

    catch(lambda: engine.backward(mean_loss(engine.module, 0, 0)))
    catch(engine.step)
    catch(lambda: Engine(built(tied), ZeroConfig(micro_batches=1, chunk=0), AdamW()))
    catch(lambda: engine_of(rank, ZeroConfig(units=("blocks", "blocks.1"))))
    catch(lambda: engine_of(rank, ZeroConfig(units=(nn.Conv2d,))))
    catch(lambda: engine.step(lr=[1, 2, 3]))
    own: Any = torch.optim.AdamW(engine.module.parameters())
    catch(lambda: Engine(built(tied), ZeroConfig(), own))
    catch(lambda: [next(engine.micro_batches()), next(engine.micro_batches())])
    return texts


def test_misuse_is_named(pool: Pool) -> None:
    """Calls that have no meaning raise errors with a stable code and a way out."""
    texts = pool.run(1, _misuse)[0]
    assert [text.split(":")[0] for text in texts] == [
        "engine_misused", "engine_misused", *["config_invalid"] * 5, "engine_misused",
    ]  # fmt: skip
    assert "'blocks.1' stands inside unit 'blocks'" in texts[3] and "the class Conv2d" in texts[4]
    assert "torch AdamW" in texts[6] and "ElementWise(lambda" in texts[6]
    assert UsageError.code == "engine_misused"


def _unlike(rank: Rank, name: str, values: tuple[Any, Any]) -> str:
    """What is said of a setting that the ranks have differently."""
    value = values[rank.rank]
    optimizer = AdamW(lr=value) if name == "lr" else AdamW()
    try:
        Engine(built(Tied), ZeroConfig(**({} if name == "lr" else {name: value}), **NUMBERS), optimizer, rank.group)
        return "built"
    except DivergedError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("stage", (1, 2)),
        ("transport", ("group", "shared")),
        ("reducer", ("scatter", "naive")),
        ("precision", ("fp32", "bf16")),
        ("lr", (1e-3, 1e-4)),
    ],
)
def test_ranks_with_unlike_settings_are_told_before_anything_is_built(
    pool: Pool, name: str, values: tuple[Any, Any]
) -> None:
    """They would wait for each other for ever, read past a buffer, or drift apart in silence."""
    for said in pool.run(2, _unlike, name, values):
        where = "optimizer.groups[0].lr" if name == "lr" else f"config.{name}"
        assert said.startswith(f"{where} is {values[0]!r} on rank 0 and {values[1]!r} on rank 1")


UNLIKE: dict[str, Callable[[int], Any]] = {
    "inner": lambda rank: EMA(AdamW(weight_decay=0.1 * rank), 0.9),
    "decay": lambda rank: EMA(AdamW(), (0.9, 0.99)[rank]),
    "momentum=0.9": lambda rank: ElementWise(lambda p: torch.optim.RMSprop(p, momentum=(0.9, 0.8)[rank])),
}


def _unlike_optimizers(rank: Rank, what: str) -> str:
    optimizer = UNLIKE[what.replace("'momentum': 0.9", "momentum=0.9")](rank.rank)
    try:
        Engine(built(Tied), ZeroConfig(**NUMBERS), optimizer, rank.group)
        return "built"
    except DivergedError as error:
        return str(error)


@pytest.mark.parametrize("what", ["inner", "decay", "'momentum': 0.9"])
def test_settings_inside_an_optimizer_are_compared_too(pool: Pool, what: str) -> None:
    """An average's, its inner optimizer's, those of a torch class."""
    for said in pool.run(2, _unlike_optimizers, what):
        assert said.startswith("optimizer.groups[0].") and what in said and "on rank 1" in said, said


def _load_unlike(rank: Rank, stage: int) -> str:
    engine = engine_of(rank, ZeroConfig(stage, **NUMBERS))
    state = engine.full_state_dict()
    state["norm.weight"] = state["norm.weight"] + rank.rank
    before = engine.digest_part()
    try:
        engine.load_full_state_dict(state)
        return "loaded"
    except DivergedError as error:
        assert engine.digest_part() == before
        return str(error)


def test_ranks_that_load_unlike_states_are_told_and_nothing_is_written(pool: Pool) -> None:
    for stage in (0, 3):
        for said in pool.run(2, _load_unlike, stage):
            assert said.startswith("parameter 'norm.weight' differs between rank 0 and rank 1 in the state to load")


def _unlike_rates(rank: Rank, stage: int) -> str:
    engine = engine_of(rank, ZeroConfig(stage, **NUMBERS))
    for index in engine.micro_batches():
        engine.backward(mean_loss(engine.module, 0, index))
    before = engine.digest_part()
    try:
        engine.step(lr=1e-3 * (1 + rank.rank))
    except DivergedError as error:
        assert engine.digest_part() == before
        return str(error)
    return "stepped"


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_step_with_unlike_rates_are_told_and_nothing_moves(pool: Pool, stage: int) -> None:
    """Replicas would drift apart in silence."""
    for said in pool.run(2, _unlike_rates, stage):
        assert "[0.001, 0.001] on rank 0 and [0.002, 0.002] on rank 1" in said


def _weightless(rank: Rank, stage: int) -> tuple[bool, str, bool]:
    engine = engine_of(rank, ZeroConfig(stage, **NUMBERS))
    for index in engine.micro_batches():
        engine.backward(mean_loss(engine.module, 0, index) * 0, weight=0.0)
    result = engine.step()
    return result.skipped, result.problem, train(engine, 1)[0].skipped


def test_a_step_whose_losses_weigh_nothing_is_skipped(pool: Pool) -> None:
    """As one whose tokens are all padding: there is no mean to follow."""
    for stage in (0, 3):
        assert pool.run(2, _weightless, stage) == [(True, "step 1: the weights of all losses are 0", False)] * 2


def _unfrozen_inside(rank: Rank) -> str:
    engine = engine_of(rank, ZeroConfig(1, **NUMBERS), _with_frozen_norm)
    for index in engine.micro_batches():
        engine.module.get_parameter("norm.weight").requires_grad_(True)
        engine.backward(mean_loss(engine.module, 0, index))
    engine.step()
    try:
        train(engine, 1)
        return "trained"
    except UsageError as error:
        return str(error)


def _with_frozen_norm() -> nn.Module:
    model = Tied()
    model.norm.requires_grad_(False)
    return model


def test_a_parameter_unfrozen_inside_a_micro_batch_does_not_bring_its_gradient_along(pool: Pool) -> None:
    """No hook has taken it, so that it would be a part of the next step's."""
    for said in pool.run(2, _unfrozen_inside):
        assert said.startswith("parameter 'norm.weight' has a gradient that this engine did not make")


def _unlike_models(rank: Rank, what: str) -> str:
    model = built(Tied)
    if rank.rank == 1 and what == "dtype":
        model.bfloat16()
    if rank.rank == 1 and what == "trainable":
        model.get_submodule("norm").requires_grad_(False)
    if rank.rank == 1 and what == "buffer":
        model.register_buffer("extra", torch.zeros(2))
    try:
        Engine(model, ZeroConfig(1, **NUMBERS), adamw(), rank.group)
    except DivergedError as error:
        return str(error)
    return "built"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("dtype", "dtype of parameter 'tokens.weight' is 'float32' on rank 0 and 'bfloat16' on rank 1"),
        ("trainable", "trainable of parameter 'norm.weight' is True on rank 0 and False on rank 1"),
        ("buffer", "buffer 'extra' is not there on rank 0 and (2,) torch.float32 on rank 1"),
    ],
)
def test_ranks_with_unlike_models_are_told_the_first_difference(pool: Pool, what: str, said: str) -> None:
    assert pool.run(2, _unlike_models, what) == [f"the ranks built different models: {said}"] * 2


def _with_gradient(rank: Rank) -> str:
    model = built(Tied)
    mean_loss(model, 0, 0).backward()  # type: ignore[no-untyped-call]
    try:
        Engine(model, ZeroConfig(**NUMBERS), adamw(), rank.group)
    except UsageError as error:
        return str(error)
    return "built"


def test_a_gradient_from_before_the_engine_is_refused_by_name(pool: Pool) -> None:
    """Every rank would add it to the first step."""
    (said,) = pool.run(1, _with_gradient)
    assert "has a gradient that this engine did not make" in said and "zero_grad" in said
