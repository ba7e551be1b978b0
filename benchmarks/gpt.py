"""The model that the benchmarks of the engine share: a GPT of any size with a plain forward, and its work in numbers.

Import nothing else of this project here: peers run it in interpreters of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """What a GPT is made of."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    length: int  # tokens of a sequence

    @property
    def flops_per_token(self) -> float:
        """Forward and backward, matrix products and causal attention alone (Chowdhery et al. 2022, appendix B)."""
        products = 12 * self.layers * self.width**2 + self.vocabulary * self.width
        return 6.0 * products + 6.0 * self.layers * self.width * self.length


SMALL = Size(8192, 512, 6, 8, 128)  # 27.4 M parameters


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class GPT(nn.Module):
    """Untied head, learned positions."""

    def __init__(self, size: Size = SMALL) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean cross entropy of the next token; `ids` (batch, length + 1)."""
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def num_parameters(size: Size) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(size).parameters())


Step = Callable[[list[Tensor]], float]  # a rank's micro-batches -> loss of the last


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forward: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Step:
    """An optimizer step as an ordinary loop makes it, clipped to 1; `forward`: the context of a forward pass."""

    def step(batches: list[Tensor]) -> float:
        for ids in batches:
            with forward():
                loss = loss_of(model(ids[:, :-1]), ids) / len(batches)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step
