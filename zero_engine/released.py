"""Parameters whose weights are elsewhere: they keep name, shape and identity, and raise when their values are used.

Note: why the class changes and not the object. Optimizers, ties and hooks hold the Parameter itself, so it must stay
the same object; Python decides what an operation on it does by its class. `torch.nn.UninitializedParameter` becomes a
`Parameter` in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zero_engine.errors import UsageError

_FACTS = "shape dtype device requires_grad grad is_leaf layout ndim is_sparse is_quantized is_meta grad_fn itemsize"
_FACTS += " _version"
_CALLS = "size numel dim element_size is_floating_point is_complex requires_grad_ __len__ __hash__ register_hook"
_KEEP_WORKING: set[Any] = {
    *(getattr(torch.Tensor, name).__get__ for name in (*_FACTS.split(), "nbytes", "is_cuda", "_backward_hooks")),
    *(getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "grad")),
    *(getattr(torch.Tensor, name) for name in (*_CALLS.split(), "register_post_accumulate_grad_hook")),
}


class ReleasedParameter(nn.Parameter):
    """A parameter outside its window."""

    _zero_name = "a parameter"  # each has its own, see `name`

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KEEP_WORKING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        names = [f"'{each._zero_name}'" for each in tree_leaves((args, kwargs)) if isinstance(each, cls)]
        raise UsageError(
            f"{_called(func)}: the weights of {', '.join(names) or 'a parameter'} are sharded and "
            "not gathered here (ZeRO stage 3). Use them inside their unit's forward, read them whole with "
            "engine.full_state_dict(), or write them with engine.load_full_state_dict(...)"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReleasedParameter(shape={tuple(self.shape)}, dtype={self.dtype})"


def name(parameter: nn.Parameter, name: str) -> None:
    """What an error calls the parameter while it is released."""
    parameter._zero_name = name  # type: ignore[attr-defined]


def release(parameters: Iterable[nn.Parameter]) -> None:
    """Close the window."""
    for parameter in parameters:
        parameter.__class__ = ReleasedParameter


def restore(parameters: Iterable[nn.Parameter]) -> None:
    """Open the window."""
    for parameter in parameters:
        parameter.__class__ = nn.Parameter


def _called(func: Any) -> str:
    """A function, or the attribute whose getter or setter it is."""
    name = str(getattr(func, "__name__", func))
    return str(func.__self__.__name__) if name in ("__get__", "__set__") else name
