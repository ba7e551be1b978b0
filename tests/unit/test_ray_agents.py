"""Which node agents the cluster on Ray keeps, which it replaces; without a head."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from server.controller import ray_cluster
from server.controller.ray_cluster import HUNG_SECONDS, RayCluster


def test_an_agent_that_answers_nothing_for_long_is_killed_and_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped agent does not die by itself, and held up every release and launch; a slow one is kept, also by a
    driver that has never heard it.
    """
    clock, killed, made = [0.0], list[str](), list[str]()
    old = SimpleNamespace(ping=SimpleNamespace(remote=lambda: "asked"))
    silence = ray_cluster.GetTimeoutError("no answer in time")
    answers: dict[str, Any] = {"node": silence}
    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(ray_cluster, "_living_nodes", lambda: {"node": {}})
    monkeypatch.setattr(ray_cluster, "_answers", lambda asked, seconds: answers)
    monkeypatch.setattr(ray_cluster.ray, "kill", lambda handle, no_restart: killed.append(handle))
    cluster: Any = RayCluster.__new__(RayCluster)
    cluster.lock, cluster.agents, cluster.silent = threading.RLock(), {}, {}
    cluster._actor, cluster._make_agent = lambda name: old, lambda node: made.append(node) or "new"

    def look(at: float) -> Any:
        clock[0] = at
        cluster._ensure_agents()
        return cluster.agents.get("node")

    assert look(0.0) is None and look(HUNG_SECONDS) is None and killed == made == []
    answers["node"] = {"said": 1}
    assert look(HUNG_SECONDS + 1).facts == {"said": 1}
    answers["node"] = silence
    assert look(100.0).facts == look(100.0 + HUNG_SECONDS).facts == {"said": 1}, "the clock began anew"
    assert look(101.0 + HUNG_SECONDS) == "new" and (killed, made) == ([old], ["node"])
