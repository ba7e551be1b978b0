"""`Cluster` on Ray; it runs in the driver process (`ray_driver.py`). `ray_agents.py` keeps an agent on every node.

Everything is found by name, so nothing has to be remembered:
    placement group   attempt:<job>:<attempt>:<fence>:<ranks>:<namespace>     detached, one bundle per rank
    rank actor        rank:<attempt>:<rank>                                   detached, never restarted
    node agent        agent:<node>                          detached, never restarted; made anew when it died or hangs

All of it lives in the namespace of the installation (`RayOptions.namespace`): on a shared cluster others do not see it.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayError
from ray.util import list_named_actors, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from server.controller.cluster import ClusterState, ClusterUnavailable, Launch, LaunchFailed, NoCapacity
from server.controller.ray_agents import RayAgents
from server.controller.ray_calls import (
    ANSWER_SECONDS,
    PLACE_SECONDS,
    START_SECONDS,
    actor_named,
    answers_of,
    living_nodes,
    require,
    wait_until,
)
from server.controller.ray_placement import (
    Placed,
    free_slots,
    group_name,
    placed_of,
    rank_name,
    reported,
)
from server.controller.ray_target import RayOptions, RayTarget
from server.controller.ray_view import attempts_of, node_of
from workers.contract import AttemptId
from workers.rank_actor import ActorPlan, RankActor

RELEASE_SECONDS = 15.0

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class _Seen:
    """The last answer of a rank actor."""

    state: dict[str, Any]
    at: float = field(default_factory=time.monotonic)


def reachable(method: Callable[P, T]) -> Callable[P, T]:
    """Say ClusterUnavailable for whatever Ray raises."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except (RayError, ConnectionError, TimeoutError, RuntimeError, SystemError) as error:
            raise ClusterUnavailable(f"{method.__name__}: {error}") from error

    return call


class RayCluster:
    """The real cluster; see `Cluster` for what each method promises. Thread-safe."""

    def __init__(self, target: RayTarget, options: RayOptions) -> None:
        """Connect. Ray's variables (`ray_head.ray_environment`) must stand in the environment already."""
        self.options = options
        loopback: dict[str, Any] = {"_node_ip_address": "127.0.0.1"} if target.local else {}
        ray.init(
            address=target.address,
            namespace=options.namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **loopback,
        )
        self.seen: dict[str, _Seen] = {}  # by actor name
        self.launching: set[AttemptId] = set()
        self._actor_class: Any = ray.remote(RankActor)
        self._agents = RayAgents(target, options)
        self._agents.ensure()

    # ---- looking -----------------------------------------------------------------------------------------------

    @reachable
    def observe(self) -> ClusterState:
        launching = set(self.launching)  # before the look: one that lands meanwhile may still look half launched
        self._agents.ensure()
        placed, reports = _placed(), _free_resources()  # of all: what others hold is not free
        free = {kind: free_slots(kind, placed, reports) for kind in ("CPU", "GPU")}
        lost = self._lost_ranks()
        states = self._states(name for name in self._names() if name.startswith("rank:"))
        said = self._agents.facts
        nodes = tuple(node_of(facts, said.get(node, {}), free) for node, facts in sorted(living_nodes().items()))
        return ClusterState(nodes, tuple(attempts_of(self._ours(placed), states, lost, launching | self.launching)))

    def _states(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """What each living rank actor says now; one that does not answer in time is taken as last seen, grown older."""
        asked = {name: handle.state.remote() for name in names if (handle := self._actor(name)) is not None}
        answers = answers_of(asked, ANSWER_SECONDS)
        states: dict[str, dict[str, Any]] = {}
        for name, answer in answers.items():
            if isinstance(answer, dict):
                self.seen[name] = _Seen(answer)
                states[name] = answer
            elif isinstance(answer, GetTimeoutError) and name in self.seen:
                seen = self.seen[name]
                age = seen.state["heartbeat_age_seconds"] + time.monotonic() - seen.at
                states[name] = {**seen.state, "heartbeat_age_seconds": age}
        self.seen = {name: seen for name, seen in self.seen.items() if name in asked}
        return states

    def _lost_ranks(self) -> dict[str, dict[str, Any]]:
        """What the agents say of ranks whose actor is dead, by the actor's name."""
        lost: dict[str, dict[str, Any]] = {}
        for node_id, answer in answers_of(self._agents.ask("lost_ranks"), ANSWER_SECONDS).items():
            for said in answer if isinstance(answer, list) else []:
                lost[rank_name(said["attempt_id"], said["rank"])] = {**said, "node_id": node_id}
        return lost

    # ---- launching ---------------------------------------------------------------------------------------------

    @reachable
    def launch(self, launch: Launch) -> None:
        if self._stands(launch):
            return
        self._release(launch.attempt_id)
        self._require_capacity(launch)
        self.launching.add(launch.attempt_id)
        try:
            self._start(launch)
        except BaseException:
            self._release(launch.attempt_id)
            raise
        finally:
            self.launching.discard(launch.attempt_id)
        self._agents.ask("warm")

    def _stands(self, launch: Launch) -> bool:
        """Whether all ranks of this attempt have been started already, this fence and no other."""
        if not any(group.attempt_id == launch.attempt_id for group in self._ours(_placed())):
            return False
        states = self._states(rank_name(launch.attempt_id, order.rank) for order in launch.orders)
        return len(states) == len(launch.orders) and all(
            said["fence"] == launch.fence and said["status"] != "starting" for said in states.values()
        )

    def _require_capacity(self, launch: Launch) -> None:
        """Raise NoCapacity unless the whole attempt is known to fit now: no placement group waits in Ray."""
        kind = _resource(launch)
        free = sum(free_slots(kind, _placed(), _free_resources()).values())
        if free < len(launch.orders):
            raise NoCapacity(f"{len(launch.orders)} ranks need as many {kind} slots; {free} are free")

    def _start(self, launch: Launch) -> None:
        kind, ranks = _resource(launch), len(launch.orders)
        name = group_name(launch.job_id, launch.attempt_id, launch.fence, ranks, self.options.namespace)
        group = placement_group([{kind: 1}] * ranks, strategy="PACK", name=name, lifetime="detached")
        if not group.wait(PLACE_SECONDS):
            raise NoCapacity(f"Ray did not place {ranks} bundles of one {kind} within {PLACE_SECONDS:.0f} s")
        nodes = _bundle_nodes(group)
        bundles = sorted(range(ranks), key=lambda index: (nodes[index], index))  # ranks of one node stand together
        zygotes = self._agents.zygotes(sorted(set(nodes)))
        actors = [
            self._make_actor(launch, rank, group, bundle, zygotes[nodes[bundle]]) for rank, bundle in enumerate(bundles)
        ]
        master = actors[0].bind.remote(self._host(nodes[bundles[0]], len(set(nodes))))
        started = {
            rank: actor.start.remote(
                launch.orders[rank].model_dump_json(), master, zygotes[nodes[bundles[rank]]]["zygote"]["socket_path"]
            )
            for rank, actor in enumerate(actors)
        }
        self._check_started(launch, started, [nodes[bundle] for bundle in bundles])

    def _make_actor(self, launch: Launch, rank: int, group: PlacementGroup, bundle: int, agent: dict[str, Any]) -> Any:
        order = launch.orders[rank]
        plan = ActorPlan(
            launch.job_id, launch.attempt_id, launch.fence, rank, len(launch.orders), launch.report_url,
            launch.report_token, launch.orphan_seconds, agent["register_folder"], order.device,
        )  # fmt: skip
        cuda = order.device == "cuda"
        return self._actor_class.options(
            name=rank_name(launch.attempt_id, rank),
            namespace=self.options.namespace,
            lifetime="detached",
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=8,
            num_cpus=0 if cuda else 1,
            num_gpus=1 if cuda else 0,  # repeated here: a bundle alone hides no other GPU
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        ).remote(plan)  # fmt: skip

    def _check_started(self, launch: Launch, started: dict[int, Any], nodes: Sequence[str]) -> None:
        """Raise LaunchFailed for the first rank that has no process, or whose GPU another rank has too."""
        devices: dict[tuple[str, str], int] = {}
        for rank, answer in answers_of(started, START_SECONDS).items():
            if not isinstance(answer, dict):
                raise LaunchFailed(f"rank {rank} on node {nodes[rank][:12]} was not started: {answer}")
            self.seen[rank_name(launch.attempt_id, rank)] = _Seen(answer)
            if answer["device"]:
                other = devices.setdefault((nodes[rank], answer["device"]), rank)
                if other != rank:
                    raise LaunchFailed(f"ranks {other} and {rank} were given the same GPU {answer['device']}")

    def _host(self, node_id: str, num_nodes: int) -> str:
        """Where rank 0 listens: loopback when all ranks are on one node."""
        if num_nodes == 1:
            return "127.0.0.1"
        return str(living_nodes()[node_id]["NodeManagerAddress"])

    # ---- steering ----------------------------------------------------------------------------------------------

    @reachable
    def adopt(self, attempt_id: AttemptId, report_url: str) -> None:
        asked = {name: actor.adopt.remote(report_url) for name, actor in self._actors_of(attempt_id).items()}
        asked |= self._agents.ask("redirect", attempt_id, report_url)
        answers_of(asked, ANSWER_SECONDS)

    @reachable
    def request_stop(self, attempt_id: AttemptId) -> None:
        require({name: actor.stop.remote() for name, actor in self._actors_of(attempt_id).items()})

    @reachable
    def kill(self, attempt_id: AttemptId) -> None:
        actors = self._actors_of(attempt_id)
        answers = answers_of({name: actor.kill.remote() for name, actor in actors.items()}, ANSWER_SECONDS)
        for name, answer in answers.items():
            if isinstance(answer, GetTimeoutError):  # it does not answer: its own death ends the rank
                ray.kill(actors[name], no_restart=True)

    @reachable
    def stacks(self, attempt_id: AttemptId) -> dict[int, str]:
        """The stacks of every rank's threads now, by rank."""
        asked = {
            int(name.rsplit(":", 1)[1]): actor.stacks.remote() for name, actor in self._actors_of(attempt_id).items()
        }
        return {rank: text for rank, text in answers_of(asked, ANSWER_SECONDS).items() if isinstance(text, str)}

    @reachable
    def release(self, attempt_id: AttemptId) -> None:
        self._agents.ensure()
        self._release(attempt_id)

    def _release(self, attempt_id: AttemptId) -> None:
        """Actors first (their ranks die with them), then what is left by its mark, then the placement group."""
        deadline = time.monotonic() + RELEASE_SECONDS
        for actor in self._actors_of(attempt_id).values():
            ray.kill(actor, no_restart=True)
        wait_until(lambda: not self._names_of(attempt_id), deadline, f"actors of attempt {attempt_id} live on")
        require(self._agents.ask("sweep", attempt_id))
        groups = [group for group in self._ours(_placed()) if group.attempt_id == attempt_id]
        for group in groups:
            remove_placement_group(get_placement_group(group.name))
        wait_until(
            lambda: (
                all(group.attempt_id != attempt_id for group in self._ours(_placed()))
                and not any(reported(group, _free_resources()) for group in groups)
            ),
            deadline,
            f"the placement group of attempt {attempt_id} is not removed",
        )

    def close(self) -> None:
        ray.shutdown()

    # ---- names -------------------------------------------------------------------------------------------------

    def _actor(self, name: str) -> Any | None:
        return actor_named(name, self.options.namespace)

    def _names(self) -> list[str]:
        """Names of all actors of ours, also of some that are dying."""
        entries = list_named_actors(all_namespaces=True)
        return [entry["name"] for entry in entries if entry["namespace"] == self.options.namespace]

    def _names_of(self, attempt_id: AttemptId) -> list[str]:
        return [name for name in self._names() if name.startswith(rank_name(attempt_id, 0)[:-1])]

    def _actors_of(self, attempt_id: AttemptId) -> dict[str, Any]:
        return {name: actor for name in self._names_of(attempt_id) if (actor := self._actor(name)) is not None}

    def _ours(self, placed: Sequence[Placed]) -> list[Placed]:
        return [group for group in placed if group.namespace == self.options.namespace]


def _free_resources() -> dict[str, dict[str, float]]:
    """Resources that nobody holds, by node id."""
    free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return free


def _resource(launch: Launch) -> str:
    return "GPU" if launch.orders[0].device == "cuda" else "CPU"


def _placed() -> list[Placed]:
    """Every attempt's placement group that is not removed."""
    return placed_of(placement_group_table())


def _bundle_nodes(group: PlacementGroup) -> list[str]:
    """Node id of each bundle of a placed group."""
    table = placement_group_table(group)["bundles_to_node_id"]
    return [table[index] for index in range(len(table))]
