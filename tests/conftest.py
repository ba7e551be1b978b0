"""What every test shares: the rule for a missing service, one clean environment, folders, and its end.

A service that a test needs and that is not at hand skips loudly on a laptop and fails in CI. Whatever a session starts
ends with it, also when pytest is killed: see `session.py`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests import session

# Before anything imports torch, numpy or ray: one thread per process, no phoning home.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def pytest_sessionstart() -> None:
    """From here on nothing that is started outlives this process."""
    session.watch()


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return session.ROOT


@pytest.fixture(scope="session")
def missing() -> Callable[[str], NoReturn]:
    """Call with what is missing: fails where CI is set, skips elsewhere."""

    def report(what: str) -> NoReturn:
        if os.environ.get("CI"):
            pytest.fail(f"missing in CI: {what}")
        pytest.skip(f"MISSING: {what}")

    return report


@pytest.fixture(autouse=True, scope="session")
def no_settings_from_outside() -> None:
    """A developer's own SHARDYARD_ variables must not steer the tests."""
    for name in [name for name in os.environ if name.startswith("SHARDYARD_")]:
        del os.environ[name]


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory where the machine has one: hundreds of fsyncs cost nothing there."""
    with tempfile.TemporaryDirectory(dir=session.memory_folder()) as folder:
        yield Path(folder)
