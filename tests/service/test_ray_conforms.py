"""`RayCluster`, with real ranks that train a small MLP, keeps the same promises as the fake cluster."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server.controller.cluster import Cluster
from server.controller.ray_driver import RayDriver, connect_local
from server.controller.ray_head import stop_head
from tests.service.cluster_conformance import ClusterConformance
from tests.service.report_sink import ReportSink
from workers.contract import ReportBatch

PATIENCE_SECONDS = 90.0


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
    """A Ray head of its own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sy-conf-"))
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
        deadline, pause = time.monotonic() + PATIENCE_SECONDS, threading.Event()
        while not condition():
            assert time.monotonic() < deadline, "it never came true"
            pause.wait(0.02)

    def server_away(self, away: bool) -> None:
        self.sink.trouble = lambda number: "down" if away else None

    def close(self) -> None:
        self.driver.close()
        self.sink.close()
        stop_head(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def ray_lab() -> Iterator[RayLab]:
    lab = RayLab()
    yield lab
    lab.close()


@pytest.fixture
def lab(ray_lab: RayLab) -> Iterator[RayLab]:
    """Nothing of an earlier test is left."""
    yield ray_lab
    ray_lab.server_away(False)
    for attempt in ray_lab.cluster.observe().attempts:
        ray_lab.cluster.release(attempt.attempt_id)


class TestRayCluster(ClusterConformance):
    """All of it, against Ray."""
