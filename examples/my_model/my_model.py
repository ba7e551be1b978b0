"""A model of one's own: any torch.nn.Module, built by a function that the job spec names."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Mixer(nn.Module):
    """A causal convolution and a feed-forward layer, each added to what came in."""

    def __init__(self, width: int, reach: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.reach = reach
        self.look_back = nn.Conv1d(width, width, reach, groups=width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(self.norm1(x).transpose(1, 2), (self.reach - 1, 0))  # only what came before
        x = x + self.look_back(padded).transpose(1, 2)
        return x + self.down(F.silu(self.up(self.norm2(x))))


class ConvolutionalLanguageModel(nn.Module):
    """Byte ids (B, T) to logits (B, T, 256). The blocks become the sharding units."""

    def __init__(self, width: int, depth: int, reach: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Mixer(width, reach) for _ in range(depth))
        self.head = nn.Linear(width, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def build(width: int = 96, depth: int = 4, reach: int = 8, context: int = 128) -> nn.Module:
    """Called once in every rank process, with torch's generator seeded alike. `context` is the length of a sequence."""
    assert context >= reach, "a sequence should be longer than what a block looks back on"
    return ConvolutionalLanguageModel(width, depth, reach)
