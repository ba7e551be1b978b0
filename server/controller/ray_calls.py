"""Asking actors of Ray and waiting for what they answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from server.controller.cluster import ClusterUnavailable

ANSWER_SECONDS = 3.0  # an actor that does not answer in time is taken as it was last seen
PLACE_SECONDS = 10.0
START_SECONDS = 120.0  # from the placement to a running process on every rank, a cold zygote included
EFFECT_SECONDS = 15.0  # of a call whose effect is needed
POLL_SECONDS = 0.02


def living_nodes() -> dict[str, dict[str, Any]]:
    """What Ray says of each living node, by its id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]


def actor_named(name: str, namespace: str) -> Any | None:
    """A handle of the actor, None without one."""
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def answers_of(asked: dict[Any, Any], seconds: float) -> dict[Any, Any]:
    """Each call's value, or the exception in its place; GetTimeoutError for those that did not come in time."""
    references = list(asked.values())
    ready = set(ray.wait(references, num_returns=len(references), timeout=seconds)[0]) if references else set()
    answers: dict[Any, Any] = {}
    for key, reference in asked.items():
        if reference not in ready:
            answers[key] = GetTimeoutError("no answer in time")
            continue
        try:
            answers[key] = ray.get(reference)
        except RayError as error:
            answers[key] = error
    return answers


def require(asked: dict[str, Any]) -> None:
    """Wait for calls whose effect is needed; a dead actor needs none any more."""
    for name, answer in answers_of(asked, EFFECT_SECONDS).items():
        if isinstance(answer, RayError) and not isinstance(answer, RayActorError):
            raise ClusterUnavailable(f"{name}: {answer}")


def wait_until(condition: Callable[[], bool], deadline: float, message: str) -> None:
    """Look until it holds. Raises ClusterUnavailable with the message at the deadline, on the monotonic clock."""
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterUnavailable(message)
        time.sleep(POLL_SECONDS)
