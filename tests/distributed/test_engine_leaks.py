"""Nothing of an engine that was closed, or dropped, stays behind."""

from __future__ import annotations

import gc
import os

import pytest

from tests.distributed.engine_cases import engine_of, train
from tests.distributed.rank_pool import Pool, Rank
from zero_engine import ZeroConfig


def _held() -> tuple[int, int]:
    """(open descriptors, resident bytes) of this process."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return len(os.listdir("/proc/self/fd")), int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _built_and_left(rank: Rank, transport: str, stage: int, close: bool) -> tuple[int, int]:
    measured = []
    for number in range(14):
        engine = engine_of(rank, ZeroConfig(stage, 2, 1, transport=transport), width=256, depth=2)
        train(engine, 1)
        if close:
            engine.close()
        del engine
        gc.collect()
        if number in (3, 13):
            measured.append(_held())
    (descriptors, resident), (later, grown) = measured
    return later - descriptors, grown - resident


@pytest.mark.parametrize(
    ("transport", "stage", "close"), [("shared", 1, True), ("shared", 3, True), ("group", 2, True), ("group", 3, False)]
)
def test_engines_built_and_left_leave_no_memory_and_no_descriptor(
    pool: Pool, transport: str, stage: int, close: bool
) -> None:
    """Ten engines of about 14 MiB later, a rank holds the same descriptors and less than two engines more.

    A leak of one engine each is 140 MiB; the allocator alone has kept up to 11 MiB of holes."""
    for descriptors, grown in pool.run(2, _built_and_left, transport, stage, close):
        assert descriptors <= 0
        assert grown < 28 << 20
