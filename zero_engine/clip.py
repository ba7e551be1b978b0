"""The gradient norm from block sums, and the factor that brings it down to its limit."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def block_sums(rows: Tensor, order: float, scratch: Tensor, out: Tensor) -> None:
    """One double per block: the sum of squares, of magnitudes, or the largest magnitude, by `order` 2, 1 or inf.

    `rows`: fp32, a block a row. `scratch`: fp64 of the same shape. `out`: 1-D fp64, one per block. Each row is reduced
    alone, so a block's number does not depend on its neighbours or on where it stands.
    """
    scratch.copy_(rows)
    if order == 2:
        torch.sum(scratch.square_(), 1, out=out)
    elif order == 1:
        torch.sum(scratch.abs_(), 1, out=out)
    else:
        torch.amax(scratch.abs_(), 1, out=out)


def norm_of(sums: Tensor, order: float) -> float:
    """The norm of everything, from the block sums of all blocks in flat order (1-D fp64)."""
    if sums.numel() == 0:
        return 0.0
    if order == 2:
        return math.sqrt(value) if (value := sums.sum().item()) >= 0 else math.nan
    return float(sums.sum().item() if order == 1 else sums.amax().item())


def clip_factor(norm: float, limit: float) -> float:
    """What to multiply gradients by; 1 when clipping is off (limit 0) or the norm is within the limit."""
    return 1.0 if limit == 0 else min(1.0, limit / (norm + 1e-6))
