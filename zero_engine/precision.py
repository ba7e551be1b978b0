"""What lower precision needs beside a cast: inputs in the compute dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class InputCast:
    """Casts floating-point tensors given to the model to the compute dtype, as its weights are; fp32 casts nothing."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._handle = None
        if dtype != torch.float32:
            self._handle = module.register_forward_pre_hook(self._cast_call, with_kwargs=True)

    def _cast_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return self._cast(args), self._cast(kwargs)

    def _cast(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self._dtype) if value.dtype == torch.float32 else value
        if isinstance(value, tuple | list) and type(value) in (tuple, list):
            return type(value)(self._cast(item) for item in value)
        if type(value) is dict:
            return {key: self._cast(item) for key, item in value.items()}
        return value

    def remove(self) -> None:
        """Leave the module as it was."""
        if self._handle is not None:
            self._handle.remove()
