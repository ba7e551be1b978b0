"""GPT-2 (Radford et al. 2019): names and shapes as `transformers` has them, so that an export loads there.

Differences from the released weights' recipe: erf GELU (`activation_function="gelu"`), and the output projection may
have weights of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPSILON = 1e-5


class Projection(nn.Module):
    """y = x W + b with W of shape (inputs, outputs), as GPT-2 stores it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.c_attn = Projection(hidden, 3 * hidden)
        self.c_proj = Projection(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        heads = self.c_attn(x).view(batch, length, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)  # each (B, heads, T, hidden / heads)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        projected = self.c_proj(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return F.dropout(projected, self.dropout, self.training)


class FeedForward(nn.Module):
    """Two projections with a GELU between, four times as wide inside."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.c_fc = Projection(hidden, 4 * hidden)
        self.c_proj = Projection(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x))), self.dropout, self.training)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden, eps=NORM_EPSILON)
        self.attn = Attention(hidden, heads, dropout)
        self.ln_2 = nn.LayerNorm(hidden, eps=NORM_EPSILON)
        self.mlp = FeedForward(hidden, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        y: Tensor = x + self.mlp(self.ln_2(x))
        return y


class Gpt(nn.Module):
    """Token ids (B, T) to logits (B, T, vocabulary)."""

    def __init__(
        self, *, vocabulary: int, layers: int, hidden: int, heads: int, context: int, dropout: float, tied: bool
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.wte = nn.Embedding(vocabulary, hidden)
        self.wpe = nn.Embedding(context, hidden)
        self.h = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden, eps=NORM_EPSILON)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = F.dropout(self.wte(ids) + self.wpe(positions), self.dropout, self.training)
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits
