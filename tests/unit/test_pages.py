"""Shared memory is the same memory for all who map it, in pages of any size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zero_engine import pages
from zero_engine.pages import LARGE, Mapping

SIZE = 2 * LARGE + 12_345


def _resident(address: int) -> int:
    """KB of the mapping at an address that stand in this process's tables."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{address:x}-"))
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))


@pytest.mark.parametrize("advice", [pages._MADV_COLLAPSE, 9999])
def test_who_maps_a_file_sees_what_the_owner_wrote_and_may_forget_that_it_looked(
    monkeypatch: pytest.MonkeyPatch, advice: int
) -> None:
    """In large pages, or in small ones where the kernel does not know the advice; dropping pages drops no byte."""
    monkeypatch.setattr(pages, "_MADV_COLLAPSE", advice)
    descriptor = os.memfd_create("pages")
    os.ftruncate(descriptor, SIZE)
    owner, reader = Mapping(descriptor, SIZE), Mapping(descriptor, SIZE)
    os.close(descriptor)
    owner.enlarge()
    assert not owner.bytes.any()
    owner.bytes.fill_(7)
    address = reader.bytes.data_ptr()
    assert len(reader.bytes) == SIZE and address % LARGE == owner.bytes.data_ptr() % LARGE == 0
    for _ in range(2):
        assert bool((reader.bytes == 7).all()) and _resident(address) >= SIZE // 1024
        reader.forget(0, SIZE)
        assert _resident(address) <= 4, "the last page is not whole"
