"""What every test shares: the rule for a missing service, and one clean environment.

A service that a test needs and that is not at hand skips loudly on a laptop and fails in CI.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Before anything imports torch, numpy or ray: one thread per process, no phoning home.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


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
