"""Which node agents the cluster on Ray keeps, which it replaces; without a head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from server.controller import ray_agents
from server.controller.ray_agents import HUNG_SECONDS, RayAgents
from server.controller.ray_target import RayOptions, RayTarget


def test_an_agent_that_answers_nothing_for_long_is_killed_and_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped agent does not die by itself, and held up every release and launch; a slow one is kept, also by a
    driver that has never heard it.
    """
    clock, killed, made = [0.0], list[str](), list[str]()
    old = SimpleNamespace(ping=SimpleNamespace(remote=lambda: "asked"))
    silence = ray_agents.GetTimeoutError("no answer in time")
    answers: dict[str, Any] = {"node": silence}
    monkeypatch.setattr(ray_agents, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(ray_agents, "living_nodes", lambda: {"node": {}})
    monkeypatch.setattr(ray_agents, "answers_of", lambda asked, seconds: answers)
    monkeypatch.setattr(ray_agents.ray, "kill", lambda handle, no_restart: killed.append(handle))
    agents: Any = RayAgents(RayTarget("nowhere", None, local=True, scratch=""), RayOptions())
    agents._actor, agents._make_agent = lambda node: old, lambda node: made.append(node) or "new"

    def look(at: float) -> Any:
        clock[0] = at
        agents.ensure()
        return agents._agents.get("node")

    assert look(0.0) is None and look(HUNG_SECONDS) is None and killed == made == []
    answers["node"] = {"said": 1}
    assert look(HUNG_SECONDS + 1).facts == {"said": 1}
    answers["node"] = silence
    assert look(100.0).facts == look(100.0 + HUNG_SECONDS).facts == {"said": 1}, "the clock began anew"
    assert look(101.0 + HUNG_SECONDS) == "new" and (killed, made) == ([old], ["node"])
