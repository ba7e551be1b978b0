"""The fake cluster keeps the promises of the real one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from server.controller.cluster import Cluster
from server.controller.fake_cluster import FakeCluster, cpu_node
from tests.service.cluster_conformance import ClusterConformance
from workers.contract import ReportBatch

PATIENCE = 500  # moves


@dataclass
class FakeLab:
    """A fake cluster and a server of ten lines."""

    folder: Path
    report_url: str = "http://nowhere/v1/reports"
    received: list[ReportBatch] = field(default_factory=list)
    away: bool = False

    def __post_init__(self) -> None:
        self.fake = FakeCluster((cpu_node("one", 3), cpu_node("two", 2)), self._apply)

    @property
    def cluster(self) -> Cluster:
        return self.fake

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(PATIENCE):
            if condition():
                return
            self.fake.advance()
        pytest.fail("it never came true")

    def server_away(self, away: bool) -> None:
        self.away = away

    def _apply(self, url: str, token: str, batch: ReportBatch) -> int:
        if self.away:
            raise OSError("away")
        key = (batch.attempt_id, batch.rank)
        applied = max((b.seq for b in self.received if (b.attempt_id, b.rank) == key), default=0)
        if batch.seq == applied + 1:
            self.received.append(batch)
            applied = batch.seq
        return applied


@pytest.fixture
def lab(tmp_path: Path) -> FakeLab:
    return FakeLab(tmp_path)


class TestFakeCluster(ClusterConformance):
    """All of it, against the fake."""
