"""`RayCluster`, with real ranks that train a small MLP, keeps the same promises as the fake cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server.controller.cluster import Cluster
from server.controller.ray_driver import RayDriver, connect_local
from tests.service.cluster_conformance import ClusterConformance
from tests.service.report_sink import ReportSink
from tests.waiting import wait_for
from workers.contract import ReportBatch


class KeepingSink(ReportSink):
    """Keeps the batches themselves, those applied."""

    def __init__(self) -> None:
        self.batches: list[ReportBatch] = []
        super().__init__()

    def apply(self, body: bytes, token: str) -> int:
        batch = ReportBatch.model_validate_json(body)
        before = self.applied[str(batch.attempt_id), int(batch.rank)]
        applied = super().apply(body, token)
        if applied > before:
            self.batches.append(batch)
        return applied


class RayLab:
    """The session's head, seen by a server of a few lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.driver: RayDriver = connect_local(self.folder, 4)
        self.sink = KeepingSink()
        self.driver.open()

    @property
    def cluster(self) -> Cluster:
        return self.driver

    @property
    def received(self) -> list[ReportBatch]:
        return self.sink.batches

    @property
    def report_url(self) -> str:
        return self.sink.url

    def until(self, condition: Callable[[], bool]) -> None:
        wait_for(condition)

    def server_away(self, away: bool) -> None:
        self.sink.trouble = lambda number: "down" if away else None

    def close(self) -> None:
        self.driver.close()
        self.sink.close()

    def clean(self) -> None:
        """Nothing of an earlier test is left, and the server is back."""
        self.server_away(False)
        for attempt in self.cluster.observe().attempts:
            self.cluster.release(attempt.attempt_id)


@pytest.fixture(scope="module")
def ray_lab(ray_folder: Path) -> Iterator[RayLab]:
    lab = RayLab(ray_folder)
    lab.clean()
    yield lab
    lab.close()


@pytest.fixture
def lab(ray_lab: RayLab) -> Iterator[RayLab]:
    yield ray_lab
    ray_lab.clean()


class TestRayCluster(ClusterConformance):
    """All of it, against Ray."""
