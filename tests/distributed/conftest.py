"""One pool of ranks for the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.rank_pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Standing gloo ranks; see rank_pool.py."""
    ranks = Pool()
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def wide_pool() -> Iterator[Pool]:
    """Eight of them, for the few tests that need more than five."""
    ranks = Pool(8)
    yield ranks
    ranks.stop()
