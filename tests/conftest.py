"""What every test shares: the rule for a missing service, one clean environment, folders, and its end.

A service that a test needs and that is not at hand skips loudly on a laptop and fails in CI. Whatever a session starts
ends with it, also when pytest is killed: see `session.py`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from tests import session

if TYPE_CHECKING:
    from tests.running_service import Service

# Before anything imports torch, numpy or ray: one thread per process, no phoning home.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


# The lanes of .ci/lanes, by folder. Of the service, 3 has what runs on Ray, 4 the API, 1 the rest.
LANES = {1: {"service"}, 2: {"distributed"}, 3: {"service"}, 4: {"service", "unit"}, 5: {"browser", "smoke"}}
RAY = {"ray", "ray_harness", "ray_folder"}  # service tests with these fixtures are in lane 3


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--lane` for .ci/lanes; without it everything that was asked for runs."""
    parser.addoption("--lane", type=int, choices=LANES, help="the tests of one lane: " + str(LANES))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import a folder that is wholly in other lanes."""
    lane = config.getoption("--lane")
    if lane is None or collection_path.parent != session.ROOT / "tests" or not collection_path.is_dir():
        return None
    return None if collection_path.name in LANES[lane] else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of the other lanes."""
    lane = config.getoption("--lane")
    if lane is not None:
        config.hook.pytest_deselected(items=[item for item in items if lane_of(item) != lane])
        items[:] = [item for item in items if lane_of(item) == lane]


def lane_of(item: pytest.Item) -> int:
    """Each test is in exactly one lane."""
    folder = item.path.relative_to(session.ROOT / "tests").parts[0]
    needs_ray = not RAY.isdisjoint(getattr(item, "fixturenames", ())) or item.path.name == "test_ray_head.py"
    if folder == "service":
        return 3 if needs_ray else 4 if item.path.name.startswith("test_api_") else 1
    return next(lane for lane, folders in LANES.items() if folder in folders)


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
    """A developer's own SHARDYARD_ variables must not steer the tests. A worker that nobody takes costs seconds."""
    for name in [name for name in os.environ if name.startswith("SHARDYARD_")]:
        del os.environ[name]
    os.environ["SHARDYARD_IDLE_WORKERS"] = "1"


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """The service with a Ray head of its own that all browser and smoke tests share."""
    from tests.running_service import start, stop

    running = start(session.short_folder("service"))
    yield running
    stop(running)


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory where the machine has one: hundreds of fsyncs cost nothing there."""
    with tempfile.TemporaryDirectory(dir=session.memory_folder()) as folder:
        yield Path(folder)
