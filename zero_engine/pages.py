"""Host memory in large pages, where the kernel gives them. Torch is loaded for tensors only.

A step streams through weights, moments, sums and messages from one end to the other. In pages of 4 KB a prefetch stops
at each page and each needs a translation of its own; in pages of 2 MB neither is felt.

Note: how shared memory gets large pages. A setting of the kernel usually keeps a memfd out of them (`shmem_enabled`),
but not out of a collapse that a process asks for (MADV_COLLAPSE, Linux 6.1). It wants file and address to start at a
large page alike, and a byte in each large page; every process that maps the file at such an address shares them, and
then meets one fault for 512 pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LARGE = 2 << 20  # bytes of a large page, and the least that is worth one
_MADV_COLLAPSE, _MAP_FIXED = 25, 0x10  # of Linux; Python has no names for them


def large_pages(num_bytes: int) -> mmap.mmap:
    """Private memory, zero when it is first touched; in large pages where the platform and the kernel have them."""
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        region.madvise(mmap.MADV_HUGEPAGE)
    return region


def host_memory(num_bytes: int) -> Tensor:
    """1-D uint8, zero, and there: memory that cannot be had is missed now, not in a step."""
    import torch

    if num_bytes < LARGE:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    whole = torch.frombuffer(large_pages(num_bytes + LARGE), dtype=torch.uint8)
    start = -whole.data_ptr() % LARGE
    return whole[start : start + num_bytes].zero_()


class Mapping:
    """A file in this process's memory, shared with all who map it."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        import torch

        self._region = mmap.mmap(-1, num_bytes + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # its place alone
        whole = torch.frombuffer(self._region, dtype=torch.uint8)
        self._start = -whole.data_ptr() % LARGE
        self.bytes = whole[self._start : self._start + num_bytes]  # 1-D uint8
        _map_at(self.bytes.data_ptr(), num_bytes, descriptor)

    def enlarge(self) -> None:
        """Turn the pages of a fresh file into large ones, where the kernel can, but for a rest at the end."""
        whole = len(self.bytes) // LARGE * LARGE
        if whole:
            self.bytes[:whole:LARGE] = 0
            with suppress(OSError):
                self._region.madvise(_MADV_COLLAPSE, self._start, whole)

    def forget(self, start: int, stop: int) -> None:
        """Drop the pages of bytes `start` to `stop` from this process's tables: they belong to who wrote them."""
        start, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop:
            self._region.madvise(mmap.MADV_DONTNEED, self._start + start, stop - start)


def _map_at(address: int, num_bytes: int, descriptor: int) -> None:
    """Map a file over what stands at an address, which Python's mmap leaves to the kernel."""
    place = ctypes.CDLL(None, use_errno=True).mmap
    place.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    place.restype = ctypes.c_void_p
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if place(address, num_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != address:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {num_bytes} bytes of shared memory: {os.strerror(error)}")
