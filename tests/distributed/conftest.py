"""One pool of ranks for the session."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.rank_pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Standing gloo ranks; see rank_pool.py."""
    ranks = Pool()
    yield ranks
    ranks.stop()


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory where the machine has one: hundreds of fsyncs cost nothing there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="shardyard-test-") as folder:
        yield Path(folder)
