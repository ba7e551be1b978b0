"""The node agents of a cluster on Ray: one on every living node, replaced when it died or hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from server.controller.cluster import LaunchFailed
from server.controller.ray_calls import (
    ANSWER_SECONDS,
    PLACE_SECONDS,
    POLL_SECONDS,
    START_SECONDS,
    actor_named,
    answers_of,
    living_nodes,
)
from server.controller.ray_placement import agent_name
from server.controller.ray_target import RayOptions, RayTarget
from workers.agent import AgentPlan, NodeAgent

HUNG_SECONDS = 20.0  # an agent that answers nothing for so long is killed; its attempts live on


@dataclass
class _Agent:
    """An agent that answered, and what it said last."""

    handle: Any
    facts: dict[str, Any]


class RayAgents:
    """Asks all of them at once. Thread-safe."""

    def __init__(self, target: RayTarget, options: RayOptions) -> None:
        self._target, self._options = target, options
        self._agents: dict[str, _Agent] = {}  # by node id
        self._silent: dict[str, float] = {}  # by node id: when its agent was first asked in vain
        self._lock = threading.RLock()
        self._class: Any = ray.remote(NodeAgent)

    @property
    def facts(self) -> dict[str, dict[str, Any]]:
        """What each agent said last, by node id."""
        return {node: agent.facts for node, agent in self._agents.items()}

    def ask(self, method: str, *given: Any) -> dict[str, Any]:
        """Call a method of every agent: a reference to each answer, by node id."""
        return {node: getattr(agent.handle, method).remote(*given) for node, agent in self._agents.items()}

    def ensure(self) -> None:
        """An agent on every living node. One that is only slow is kept; one that died or hangs is replaced."""
        with self._lock:
            nodes = living_nodes()
            handles = {node: self._actor(node) for node in nodes}
            asked = {node: handle.ping.remote() for node, handle in handles.items() if handle is not None}
            answers = answers_of(asked, ANSWER_SECONDS)
            agents: dict[str, _Agent] = {}
            for node in nodes:
                answer = answers.get(node)
                if isinstance(answer, dict):
                    agents[node] = _Agent(handles[node], answer)
                elif isinstance(answer, GetTimeoutError) and not self._hangs(node):
                    agents |= {node: self._agents[node]} if node in self._agents else {}
                    continue
                elif (made := self._replace_agent(node, handles[node])) is not None:
                    agents[node] = made
                self._silent.pop(node, None)
            self._agents = agents

    def _hangs(self, node: str) -> bool:
        """Whether an agent that did not answer now has not for long: stopped, or stuck where no thread of it runs."""
        now = time.monotonic()
        return now - self._silent.setdefault(node, now) > HUNG_SECONDS

    def _replace_agent(self, node: str, old: Any | None) -> _Agent | None:
        if old is not None:
            ray.kill(old, no_restart=True)
        return self._make_agent(node)

    def _make_agent(self, node: str) -> _Agent | None:
        """A new agent on this node, once the name of a dead one is free; None when it does not answer yet."""
        facts, options = living_nodes()[node], self._options
        raylet = f"{facts['NodeManagerAddress']}:{facts['NodeManagerPort']}"
        plan = AgentPlan(
            node, raylet, self._target.scratch, options.entry, options.preload, options.path, options.warm_workers
        )
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            try:
                kind = self._class.options(
                    name=agent_name(node),
                    namespace=self._options.namespace,
                    lifetime="detached",
                    max_restarts=0,
                    max_concurrency=8,
                    num_cpus=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                )
                handle = kind.remote(plan)
                answer = answers_of({node: handle.ping.remote()}, PLACE_SECONDS)[node]
                return _Agent(handle, answer) if isinstance(answer, dict) else None
            except ValueError:  # the name is still taken
                if time.monotonic() > deadline:
                    return None
                time.sleep(POLL_SECONDS)

    def zygotes(self, nodes: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What the agents of these nodes say once their zygotes answer. Raises LaunchFailed naming the node."""
        self.ensure()
        missing = [node for node in nodes if node not in self._agents]
        if missing:
            raise LaunchFailed(f"node {missing[0][:12]} has no agent")
        answers = answers_of({node: self._agents[node].handle.ensure_zygote.remote() for node in nodes}, START_SECONDS)
        for node, answer in answers.items():
            if not isinstance(answer, dict):
                raise LaunchFailed(f"node {node[:12]} has no zygote: {answer}")
        return answers

    def _actor(self, node: str) -> Any | None:
        return actor_named(agent_name(node), self._options.namespace)
