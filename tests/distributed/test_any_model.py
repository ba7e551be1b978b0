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


MODELS = [
    TiedAcross, SameModuleTwice, CalledTwice, OtherOrder, Sometimes, PartOfBlock, OddShapes, FrozenParts, Checkpointed,
    Structured, NoUnits,
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
