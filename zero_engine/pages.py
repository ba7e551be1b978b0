"""Host memory in large pages, where the kernel gives them. Torch is loaded for tensors only.

A step streams through weights, moments, sums and messages from one end to the other. In pages of 4 KB a prefetch stops
at each page and each needs a translation of its own; in pages of 2 MB neither is felt.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LARGE = 2 << 20  # bytes of a large page, and the least that is worth one


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
