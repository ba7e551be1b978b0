"""Bytes that a step holds beyond the engine's own: activations, gradient leaves, temporaries. While a step is watched.

On a GPU the allocator knows. On a CPU a dispatch mode sees every new storage and the end of each: the same kernels run,
so no bit changes, but each operation takes longer; hence only while somebody asked.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class MemoryMeter(Protocol):
    """Watches from `start` to `stop`."""

    def start(self) -> None: ...

    def peak(self) -> int:
        """Most bytes held at once since the last call, or the start."""

    def stop(self) -> None: ...


class HostMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages that operations make, from their making to their end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._living: dict[int, tuple[weakref.ref[Any], int]] = {}  # by identity of the storage: (end, bytes)
        self._held = self._peak = 0

    def start(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._living.clear()

    def peak(self) -> int:
        peak, self._peak = self._peak, self._held
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if id(storage) not in given and id(storage) not in self._living:
                self._note(storage)
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        self._living[key] = (weakref.ref(storage, lambda _: self._forget(key)), size)
        self._held += size
        self._peak = max(self._peak, self._held)

    def _forget(self, key: int) -> None:
        known = self._living.pop(key, None)
        self._held -= known[1] if known else 0


class DeviceMeter:
    """Reads the allocator's high water mark, over what was allocated when the step began."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device) - self._before
        torch.cuda.reset_peak_memory_stats(self._device)
        return max(0, peak)

    def stop(self) -> None:
        """Nothing was changed."""


def meter_of(device: torch.device) -> MemoryMeter:
    """The meter of a device."""
    return DeviceMeter(device) if device.type == "cuda" else HostMeter()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors among the arguments or results of an operation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
