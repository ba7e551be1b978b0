"""Forward and backward on tensors without contents: what they would hold, and how much they would compute.

What is counted is every storage that an operation makes, from then until nobody holds it: activations that autograd
saves, once however many views it saves of them, and whatever operations pass to each other. Weights, buffers and the
batch are not; a gradient leaf is until the engine has taken it. Recomputed units recompute here too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from zero_engine.activations import Activations
from zero_engine.config import ZeroConfig
from zero_engine.precision import InputCast
from zero_engine.units import find_units


@dataclass(frozen=True)
class Empty:
    """A tensor of a batch: its shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class DryRun:
    """One micro-batch."""

    peak_bytes: int  # the most that stood beside weights and what the engine owns
    kept_bytes: int  # when backward began
    flops: int  # of matrix products, convolutions and attention, forward and backward, recomputed ones too
    attention_flops: int  # those of them that are attention's


def dry_run(model: nn.Module, loss_of: Callable[..., Tensor], batch: Sequence[Empty], config: ZeroConfig) -> DryRun:
    """One micro-batch of `loss_of(model, *batch)` in the config's precision and with its checkpointing.

    The model may stand on the meta device; it is put back as it was. Raises what its code raises on tensors whose
    values cannot be read.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _emptied(model, mode, config):
        inputs = [_fake(mode, torch.empty(each.shape, dtype=each.dtype, device="meta")) for each in batch]
        activations = Activations(list(find_units(model, config.units).values()), config.activation_checkpointing)
        cast = InputCast(model, getattr(torch, config.compute_dtype))
        handles = [taken(each) for each in model.parameters() if each.requires_grad]
        try:
            with Observed() as observed:
                loss = loss_of(model, *inputs)
                kept = observed.now
                loss.backward()  # type: ignore[no-untyped-call]
        finally:
            activations.remove()
            cast.remove()
            for handle in handles:
                handle.remove()
    return DryRun(observed.peak, kept, observed.flops, observed.attention_flops)


def taken(parameter: nn.Parameter) -> Any:
    """Drop each gradient leaf as it appears, as the engine does once it has copied it; returns the hook's handle."""

    def take(parameter: Tensor) -> None:
        parameter.grad = None

    register: Any = parameter.register_post_accumulate_grad_hook
    return register(take)


class Observed(TorchDispatchMode):
    """Counts the storages that operations inside the block make while they live, and what the operations compute.

    Note: why not torch's `FlopCounterMode`. It follows modules with hooks that keep recomputed activations alive.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.flops = self.attention_flops = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._given: set[int] = set()  # storages that came from outside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._alive:
                self._given.add(tensor.untyped_storage()._cdata)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        attention: Any = _CPU_ATTENTION.get(func._overloadpacket)
        formula: Any = attention or flop_registry.get(func._overloadpacket)
        if formula is not None:
            count = formula(*args, **(kwargs or {}), out_val=result)
            self.flops += count
            self.attention_flops += count if attention else 0
        return result

    def _see(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._given:
            return
        self.now += size
        self.peak = max(self.peak, self.now)

        def forget(_: Any) -> None:
            self.now -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, forget)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    count: int = sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
    return count


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    shapes = (gradient.shape, query.shape, key.shape, value.shape)
    count: int = sdpa_backward_flop_count(*shapes)  # type: ignore[no-untyped-call]
    return count


_ATEN: Any = torch.ops.aten
_CPU_ATTENTION = {  # torch's own table has the kernels of GPUs
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@contextmanager
def _emptied(model: nn.Module, mode: FakeTensorMode, config: ZeroConfig) -> Iterator[None]:
    """Parameters (in their compute dtype) and buffers without contents inside the block; ties stay."""
    kept = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    made: dict[int, Any] = {}
    try:
        for module, parameters, buffers in kept:
            for name, parameter in parameters.items():
                if parameter is not None and id(parameter) not in made:
                    dtype = getattr(torch, config.compute_dtype) if parameter.dtype == torch.float32 else None
                    bare = _fake(mode, torch.empty_like(parameter, dtype=dtype, device="meta"))
                    made[id(parameter)] = nn.Parameter(bare, parameter.requires_grad)
                module._parameters[name] = None if parameter is None else made[id(parameter)]
            for name, buffer in buffers.items():
                if buffer is not None and id(buffer) not in made:
                    made[id(buffer)] = _fake(mode, torch.empty_like(buffer, device="meta"))
                module._buffers[name] = None if buffer is None else made[id(buffer)]
        yield
    finally:
        for module, parameters, buffers in kept:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _fake(mode: FakeTensorMode, bare: Tensor) -> Tensor:
    return FakeTensor(mode, bare, torch.device("cpu"))
