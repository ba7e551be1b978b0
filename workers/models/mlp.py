"""A multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    """Vectors (B, inputs) to logits (B, outputs); ReLU between linear layers."""

    def __init__(self, *, inputs: int, hidden: Sequence[int], outputs: int) -> None:
        super().__init__()
        widths = [inputs, *hidden, outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        *inner, last = self.layers
        for layer in inner:
            x = F.relu(layer(x))
        logits: Tensor = last(x)
        return logits
