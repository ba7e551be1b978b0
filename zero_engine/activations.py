"""Activation checkpointing of units: forget activations in forward, compute them again in backward, the same bits.

Note: why the unit's `forward` is replaced and the module not wrapped. Hooks stand around `__call__`, so the
recomputation runs inside the unit's own backward window, with its weights gathered, and no state dict changes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_ATEN: Any = torch.ops.aten
KEPT = {  # outputs worth their memory: attention, and products whose sides are alike
    _ATEN.bmm.default,
    _ATEN.convolution.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
}


PRODUCTS = {_ATEN.mm.default: 0, _ATEN.addmm.default: 1}  # where (m, k) and (k, n) stand among the arguments
EXPANSION = 4  # n / k from which a product is recomputed: its output is the largest of the block, its cost a third
#                of the block's forward; and k / n from which it is too: it ends the block, so that nothing needs it


class Activations:
    """Applies a policy to units while an engine lives: "none", "full", "selective", or "every:k" for each k-th unit."""

    def __init__(self, units: Sequence[nn.Module], policy: str) -> None:
        self._wrapped: list[tuple[nn.Module, Callable[..., Any] | None]] = []  # with a `forward` of its own
        kind, _, number = policy.partition(":")
        for index, unit in enumerate(units):
            if kind in ("full", "selective") or (kind == "every" and index % int(number) == 0):
                contexts = _selective if kind == "selective" else None
                self._wrapped.append((unit, vars(unit).get("forward")))
                unit.forward = _Recomputed(unit.forward, contexts)

    def remove(self) -> None:
        """Leave the units as they were."""
        for unit, own in self._wrapped:
            del unit.forward
            if own is not None:
                unit.forward = own
        self._wrapped.clear()


class _Recomputed:
    """In the place of a unit's `forward`."""

    def __init__(self, forward: Callable[..., Any], contexts: Callable[[], Any] | None) -> None:
        self._forward, self._contexts = forward, contexts
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        options: dict[str, Any] = {} if self._contexts is None else {"context_fn": self._contexts}
        return checkpoint(self._forward, *args, use_reentrant=False, **options, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """The plain forward of the unit's copy: no engine trains it."""
        return copy.deepcopy(self._forward, memo)


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in KEPT or (operation in PRODUCTS and _alike(args[PRODUCTS[operation] + 1]))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _alike(weight: torch.Tensor) -> bool:
    """Whether (k, n) neither widens nor narrows much."""
    k, n = weight.shape
    return n < EXPANSION * k and k < EXPANSION * n
