"""Small models and a loop for the engine's tests: pure functions of their arguments, importable in rank processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.rank_pool import Rank
from zero_engine import AdamW, Engine, ZeroConfig
from zero_engine.adamw import Optimizer
from zero_engine.reference import Reference

VOCABULARY, LENGTH = 31, 7


class Block(nn.Module):
    """A pre-norm residual block with an odd inner width."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return y


class Tied(nn.Module):
    """Embedding tied to the head, blocks with odd sizes, dropout: a small stand-in for a language model."""

    def __init__(self, width: int = 24, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def tied(**kwargs: Any) -> nn.Module:
    return Tied(**kwargs)


def adamw() -> Optimizer:
    """Two groups: no decay on biases and norms."""
    groups = [{"params": ["*.bias", "*norm.weight"], "weight_decay": 0.0}]
    return AdamW(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, groups=groups)


def tokens(step: int, index: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a micro-batch, (2, LENGTH) int64."""
    ids = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1000 * step + index))
    return ids[:, :-1], ids[:, 1:]


def mean_loss(model: nn.Module, step: int, index: int) -> Tensor:
    inputs, targets = tokens(step, index)
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def train(trainer: Any, steps: int, loss_of: Callable[[nn.Module, int, int], Tensor] = mean_loss) -> list[Any]:
    """`steps` steps of an Engine or a Reference, from where it stands; the results."""
    results = []
    for step in range(trainer.completed_steps, trainer.completed_steps + steps):
        for index in trainer.micro_batches():
            trainer.backward(loss_of(trainer.module, step, index))
        results.append(trainer.step())
    return results


def built(model: Callable[..., nn.Module], **kwargs: Any) -> nn.Module:
    """The model with its initial weights fixed."""
    torch.manual_seed(0)
    return model(**kwargs)


def engine_of(rank: Rank, config: ZeroConfig, model: Callable[..., nn.Module] = tied, **kwargs: Any) -> Engine:
    return Engine(built(model, **kwargs), config, adamw(), rank.group)


def reference_of(config: ZeroConfig, model: Callable[..., nn.Module] = tied, **kwargs: Any) -> Reference:
    return Reference(built(model, **kwargs), config, adamw())
