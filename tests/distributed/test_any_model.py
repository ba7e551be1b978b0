"""Models that people bring: each row trains at every stage like the plain loop, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.engine_cases import VOCABULARY, Block, adamw, built, reference_of, tokens, train
from tests.distributed.rank_pool import Pool, Rank
from zero_engine import Engine, ZeroConfig
from zero_engine.arenas import Arenas
from zero_engine.errors import UsageError

NUMBERS = {"micro_batches": 6, "chunk": 2, "gradient_clipping": 0.5}


class Body(nn.Module):
    """An embedding, four blocks and a head; subclasses change how they are used."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.tokens(ids), ids))
        return logits

    def body(self, x: Tensor, ids: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class TiedAcross(Body):
    """One weight shared by two blocks: no block can own it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].up.weight = self.blocks[0].up.weight


class SameModuleTwice(Body):
    """One block registered under two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[1]


class CalledTwice(Body):
    """A block that runs twice in a forward, and one that never runs."""

    def body(self, x: Tensor, ids: Tensor) -> Tensor:
        for number in (0, 1, 0, 3):
            x = self.blocks[number](x)
        return x


class OtherOrder(Body):
    """Blocks run in another order than they are registered."""

    def body(self, x: Tensor, ids: Tensor) -> Tensor:
        for number in (2, 0, 3, 1):
            x = self.blocks[number](x)
        return x


class Sometimes(Body):
    """Which blocks run depends on the data: other ones in other micro-batches, and on other ranks."""

    def body(self, x: Tensor, ids: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number in (0, int(ids[0, 0]) % 4):
                x = block(x)
        return x


class PartOfBlock(Body):
    """Every block runs, but its second half only for some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Halves(16) for _ in range(4))

    def body(self, x: Tensor, ids: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, bool(ids[0, 0] % 2))
        return x


class Halves(Block):
    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        return super().forward(x) if whole else x + self.norm(x)


class OddShapes(Body):
    """Scalar, empty, transposed, channels-last, two dtypes, a tensor smaller than the number of ranks."""

    def __init__(self) -> None:
        super().__init__(20)
        self.scalar, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 4))
        self.turned = nn.Parameter(torch.randn(20, 12).t())
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.low = nn.Parameter(torch.randn(20, dtype=torch.bfloat16))
        self.few = nn.Parameter(torch.randn(3))

    def body(self, x: Tensor, ids: Tensor) -> Tensor:
        x = super().body(x, ids) * self.scalar + self.empty.sum() + self.low.float()
        picture = x.flatten()[:192].view(1, 3, 8, 8)
        return x + (x @ self.turned.t()) @ self.turned + self.conv(picture).mean() + self.few.prod()


class FrozenParts(Body):
    """A frozen embedding, frozen halves of blocks, a block frozen as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        for number in (0, 2):
            self.blocks[number].up.requires_grad_(False)


class Checkpointed(Body):
    """The user's own activation checkpointing, around blocks."""

    def body(self, x: Tensor, ids: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Structured(Body):
    """Blocks that return tuples and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wrapped() for _ in range(4))

    def body(self, x: Tensor, ids: Tensor) -> Tensor:
        for block in self.blocks:
            out = block(x)
            x = out["x"][0] + out["extra"]
        return x


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(16)

    def forward(self, x: Tensor) -> Any:
        y = self.block(x)
        return {"x": (y,), "extra": y.mean()}


class NoUnits(nn.Module):
    """A plain stack: everything belongs to the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, VOCABULARY))

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.net(ids)
        return logits


def plain(model: nn.Module, step: int, index: int) -> Tensor:
    inputs, targets = tokens(step, index)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _train(rank: Rank, model: Callable[..., nn.Module], config: ZeroConfig, steps: int) -> tuple[str, list[float]]:
    Arenas.fresh_byte = 0xFF  # a read of memory that nobody wrote is a NaN
    try:
        engine = Engine(built(model), config, adamw(), rank.group)
        results = train(engine, steps, plain)
        assert engine.memory() == engine.plan.memory[rank.rank]
        digest = engine.digest()
        engine.close()
    finally:
        Arenas.fresh_byte = 0
    return digest, [value for result in results for value in (result.loss, result.grad_norm)]


class Segment(Body):
    """Three blocks recomputed together inside their backward: more than there are slots."""

    def body(self, x: Tensor, ids: Tensor) -> Tensor:
        def three(x: Tensor) -> Tensor:
            for block in self.blocks[:3]:
                x = block(x)
            return x

        return self.blocks[3](checkpoint(three, x, use_reentrant=False))  # type: ignore[no-any-return]


class Passing(Block):
    """A block that may return what it was given, as stochastic depth does."""

    skipped = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.skipped else super().forward(x)


class SkippedBlocks(Body):
    """Two blocks in the middle return their input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Passing(16) for _ in range(6))
        for block in self.blocks[2:4]:
            block.skipped = True


class Gathering(Block):
    """A block that returns all earlier features beside its own."""

    def forward(self, features: list[Tensor]) -> list[Tensor]:  # type: ignore[override]
        return [*features, super().forward(sum(features, torch.zeros(())))]


class Dense(Body):
    """Every block sees the output of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gathering(16) for _ in range(5))

    def body(self, x: Tensor, ids: Tensor) -> Tensor:
        features = [x]
        for block in self.blocks:
            features = block(features)
        return features[-1] + features[2]


class Biased(Block):
    """A block that makes a bias where it is given none, after it has used its own weights, and hands it on."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.bias = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(x)
        bias = self.bias * 0.5 if bias is None else bias
        return super().forward(y + bias), bias


class SharedBias(Body):
    """The bias of the first block is handed from block to block, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Biased(16) for _ in range(5))

    def body(self, x: Tensor, ids: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias=bias)
        return x


class Slotted:
    """A result without `__dict__`."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Wrapping(Block):
    """A block whose result is an object with slots."""

    def forward(self, x: Tensor | Slotted) -> Slotted:  # type: ignore[override]
        return Slotted(super().forward(x.value if isinstance(x, Slotted) else x))


class SlottedResults(Body):
    """Blocks hand on objects with slots."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wrapping(16) for _ in range(4))

    def body(self, x: Tensor, ids: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.value  # type: ignore[no-any-return, attr-defined]


MODELS = [
    TiedAcross, SameModuleTwice, CalledTwice, OtherOrder, Sometimes, PartOfBlock, OddShapes, FrozenParts, Checkpointed,
    Structured, NoUnits, Segment, SkippedBlocks, Dense, SharedBias, SlottedResults,
]  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_odd_models_train_like_the_plain_loop(pool: Pool, model: Callable[..., nn.Module]) -> None:
    """All stages, ranks 1 to 3, with fresh memory poisoned: digest, losses and norms equal the reference loop's."""
    reference = reference_of(ZeroConfig(**NUMBERS), model)
    results = train(reference, 3, plain)
    expected = (reference.digest(), [value for result in results for value in (result.loss, result.grad_norm)])
    assert all(map(math.isfinite, expected[1]))
    for ranks, stage in ((1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (3, 1), (3, 3)):
        outcomes = pool.run(ranks, _train, model, ZeroConfig(stage=stage, **NUMBERS), 3)
        assert outcomes == [expected] * ranks, f"{ranks} ranks, stage {stage}"


class Keeping(Block):
    """A block that keeps a loss of its own as an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.kept = super().forward(y).square().mean()
        return y


class KeptLosses(Body):
    """What the blocks keep is part of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping(16) for _ in range(4))

    def body(self, x: Tensor, ids: Tensor) -> Tensor:
        return super().body(x, ids) + sum(block.kept for block in self.blocks)


def _outcome(rank: Rank, model: Callable[..., nn.Module], stage: int) -> str:
    engine = Engine(built(model), ZeroConfig(stage, **NUMBERS), adamw(), rank.group)
    try:
        train(engine, 1, plain)
        return engine.digest()
    except UsageError as error:
        return str(error)


def test_a_backward_that_comes_to_a_unit_by_a_way_of_its_own_is_exact_or_refused(pool: Pool) -> None:
    """Up to stage 2 all weights stand; at stage 3 those of a closed unit are not taken for another's."""
    reference = reference_of(ZeroConfig(**NUMBERS), KeptLosses)
    train(reference, 1, plain)
    for ranks, stage in ((1, 2), (2, 1)):
        assert pool.run(ranks, _outcome, KeptLosses, stage) == [reference.digest()] * ranks
    (refusal,) = pool.run(1, _outcome, KeptLosses, 3)
    assert "reached the loss by another way than its output" in refusal


def _input_gradient(rank: Rank, stage: int) -> list[float]:
    """Of an input of the blocks, between steps, and the digest after a step more."""
    engine = Engine(built(Body), ZeroConfig(stage, **NUMBERS), adamw(), rank.group)
    train(engine, 1, plain)
    x = torch.linspace(-1, 1, 64).view(1, 4, 16).requires_grad_()
    (gradient,) = torch.autograd.grad(engine.module.body(x, None).square().sum(), x)
    train(engine, 1, plain)
    return [*gradient.flatten().tolist(), int(engine.digest(), 16)]


def test_gradients_of_inputs_between_steps_are_the_same_at_every_stage(pool: Pool) -> None:
    """For saliency, say: weights are gathered for it, and the next step is exact."""
    (expected,) = pool.run(1, _input_gradient, 0)
    for ranks, stage in ((1, 3), (2, 2), (3, 3)):
        assert pool.run(ranks, _input_gradient, stage) == [expected] * ranks
