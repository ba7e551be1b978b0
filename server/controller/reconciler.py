"""The loop of the controller: look, load, plan, apply.

A command that fails is logged and comes again from the next plan, since a plan is made from what is, not from what was
done. What only this process knows (`Memory`) is found again after a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from server.controller import actions, loading
from server.controller.applying import Applier
from server.controller.cluster import AttemptState, Cluster, ClusterState, ClusterUnavailable, Node
from server.controller.launcher import Launcher
from server.controller.leader import Leadership, LeaseLost
from server.controller.plan_maker import PlanMaker
from server.controller.ray_head import HeadFailed
from server.controller.scheduler import plan
from server.controller.scrubber import Scrubber
from server.controller.snapshot import Snapshot
from server.controller.storekeeper import Storekeeper
from server.db import Database, utc_now
from server.lifespan import resume_stopped
from server.rows import attempts, nodes
from server.rows.attempts import RankChange
from server.settings import Settings
from server.states import AttemptStatus
from server.whole_store import OpenStore
from workers.contract import AttemptId

log = logging.getLogger("shardyard.controller")
HASTE_SECONDS = 0.2  # between looks while something starts or stops
PATIENCE_SECONDS = 0.5  # of a look for what it began; what takes longer goes on by itself
SIGN_SECONDS = 5.0  # between writes of the signs of life of ranks and nodes

QUEUE = (actions.Start, actions.Explain, actions.Delete)


@dataclass
class Memory:
    """Since when this process has missed or wondered about an attempt."""

    absent_since: dict[AttemptId, datetime] = field(default_factory=dict)
    unknown_since: dict[AttemptId, datetime] = field(default_factory=dict)
    signed_at: datetime | None = None  # when signs of life were last written
    nodes: tuple[Node, ...] | None = None  # as last written
    marked: bool = False  # a checkpoint was read back: retention may see others as the newest verified
    surveyed: bool = False  # the store was looked through for jobs that a new database does not know


class Reconciler:
    """One controller. `tick` is one look; `run` goes on until told to stop."""

    def __init__(
        self,
        database: Database,
        cluster: Cluster,
        settings: Settings,
        *,
        holder: str,
        report_url: str,
        open_store: OpenStore,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._database = database
        self._cluster = cluster
        self._settings = settings
        self._clock = clock
        self._policy = loading.policy_of(settings)
        self.leadership = Leadership(database, holder, settings.leader_lease_seconds)
        self._storekeeper = Storekeeper(database, settings, self.leadership, open_store)
        self._scrubber = Scrubber(database, settings, self.leadership, open_store)
        self._scrub: asyncio.Task[None] | None = None  # apart from `_busy`: a look never waits for it
        self._plan_maker = PlanMaker(database, settings, self.leadership)  # nor for what this builds
        self._launcher = Launcher(database, cluster, settings, self.leadership, self._storekeeper)
        self._applier = Applier(
            cluster,
            self.leadership,
            self._launcher,
            self._storekeeper,
            policy=self._policy,
            report_url=report_url,
            wake=self.wake,
        )
        self._memory = Memory()
        self._busy: dict[str, asyncio.Task[None]] = {}  # by attempt, or kind of work
        self._wake = asyncio.Event()
        self._haste = False
        self._unsettled = True  # an attempt may have ended since the last look, or this is the first
        self._draining = False  # the server is stopping: nothing starts any more

    def wake(self) -> None:
        """Look again at once. Call it from the loop's own thread."""
        self._wake.set()

    async def drain(self) -> None:
        """Start nothing any more, neither what a look under way has planned. Jobs that did start are live by now."""
        self._draining = True
        await self._launcher.close()

    async def run(self, stop: asyncio.Event) -> None:
        """Look until `stop` is set; no failure of one look ends the loop."""
        while not stop.is_set():
            self._wake.clear()
            try:
                await self.tick()
            except LeaseLost:
                log.warning("controller.lease_lost")
            except Exception:  # the loop must outlive every look
                log.exception("controller.tick_failed")
            await self._pause(stop)
        self._scrubber.stop()
        await self._plan_maker.stop()
        await self.settle()

    async def _pause(self, stop: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(self._wake.wait()), asyncio.ensure_future(stop.wait())]
        seconds = HASTE_SECONDS if self._haste else self._settings.tick_seconds
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for waiting in waits:
            waiting.cancel()

    async def settle(self) -> None:
        """Wait for everything that is under way."""
        running = self._applier.running
        await asyncio.gather(*self._busy.values(), return_exceptions=True)
        await asyncio.gather(*([self._scrub] if self._scrub else []), return_exceptions=True)
        await asyncio.gather(*self._plan_maker.making.values(), return_exceptions=True)
        await asyncio.gather(*running.launching.values(), *running.deleting.values(), return_exceptions=True)

    async def tick(self) -> bool:
        """One look. False: another controller leads."""
        if not await self.leadership.acquire():
            self._memory = Memory()
            return False
        if self._unsettled and not self._draining:
            await resume_stopped(self._database, self.leadership)
        snapshot, loaded = await self._look()
        await self._note(snapshot.cluster, loaded)
        for key, commands in _grouped(plan(snapshot, self._clock())).items():
            self._begin(key, self._carry_out(commands))
        if self._unsettled or snapshot.attempts or self._memory.marked or not self._memory.surveyed:
            self._memory.marked = False
            self._begin("store", self._keep_store())
        if loaded.plans_wanted and not self._draining:
            await self._plan_maker.begin()
        if self._scrubber.is_due and (self._scrub is None or self._scrub.done()):
            self._scrub = asyncio.create_task(self._read_back(), name="scrub")
        if self._busy:
            await asyncio.wait(self._busy.values(), timeout=PATIENCE_SECONDS)
        self._unsettled = bool(snapshot.attempts)
        self._haste = self._in_haste(snapshot)
        return True

    async def _look(self) -> tuple[Snapshot, loading.Loaded]:
        running = self._applier.running
        launching = frozenset(running.launching)  # before the look: one that lands meanwhile is not yet judged
        state, error = await self._observe()
        async with self._database.read() as connection:
            loaded = await loading.load(connection, [a.attempt_id for a in state.attempts] if state else ())
        launching |= frozenset(running.launching)
        if state is not None:
            self._remember(loaded, state, launching)
        snapshot = Snapshot(
            jobs=loaded.jobs,
            attempts=loaded.attempts,
            cluster=state,
            cluster_error=error,
            policy=self._policy,
            draining=self._draining,
            launching=launching,
            adopted=frozenset(running.adopted),
            absent_since=dict(self._memory.absent_since),
            unknown_since=dict(self._memory.unknown_since),
        )
        return snapshot, loaded

    async def _observe(self) -> tuple[ClusterState | None, str]:
        try:
            return await asyncio.to_thread(self._cluster.observe), ""
        except (ClusterUnavailable, HeadFailed) as error:
            return None, str(error)

    def _remember(self, loaded: loading.Loaded, state: ClusterState, launching: frozenset[AttemptId]) -> None:
        now, memory = self._clock(), self._memory
        listed = {a.attempt_id for a in state.attempts}
        known = {a.id for a in loaded.attempts}
        memory.absent_since = {a: memory.absent_since.get(a, now) for a in known - listed - launching}
        unknown = listed - known - launching
        if self._settings.ray_address:  # on somebody else's cluster a stranger may belong to another service
            unknown &= loaded.released
        memory.unknown_since = {a: memory.unknown_since.get(a, now) for a in unknown}
        self._applier.running.adopted &= listed | launching

    async def _note(self, state: ClusterState | None, loaded: loading.Loaded) -> None:
        """Write what was seen: changes of ranks at once, signs of life now and then."""
        if state is None:
            return
        now = self._clock()
        signs = self._memory.signed_at is None or now - self._memory.signed_at >= timedelta(seconds=SIGN_SECONDS)
        changes = [change for a in state.attempts for change in _rank_changes(a, loaded, now, signs)]
        if not changes and not signs and state.nodes == self._memory.nodes:
            return
        async with self.leadership.write() as tx:
            await attempts.set_ranks(tx, changes)
            await nodes.replace(tx, state.nodes)
        self._memory.nodes = state.nodes
        if signs:
            self._memory.signed_at = now

    def _begin(self, key: str, work: Coroutine[Any, Any, None]) -> None:
        """Start work, unless the same is still under way from an earlier look: then it will be planned again."""
        if key in self._busy:
            work.close()
            return
        task = asyncio.create_task(work, name=key)
        self._busy[key] = task
        task.add_done_callback(lambda done: self._busy.pop(key, None))

    async def _carry_out(self, commands: Sequence[actions.Command]) -> None:
        try:
            await self._applier.apply(commands)
        except ClusterUnavailable as error:
            log.warning("controller.cluster_unavailable commands=%s error=%s", commands, error)
        except LeaseLost:
            log.warning("controller.lease_lost commands=%s", commands)
        except Exception:  # the next look plans it again
            log.exception("controller.command_failed commands=%s", commands)
        self.wake()

    async def _keep_store(self) -> None:
        try:
            if not self._memory.surveyed:
                await self._storekeeper.recover()
                self._memory.surveyed = True
            await self._storekeeper.retain()
        except LeaseLost:
            log.warning("controller.lease_lost command=retain")
        except Exception:  # a store that is away must not stop the loop
            log.exception("controller.storekeeping_failed")

    async def _read_back(self) -> None:
        try:
            self._memory.marked |= await self._scrubber.work()
        except LeaseLost:
            log.warning("controller.lease_lost command=scrub")
        except Exception:  # the loop must outlive every reading
            log.exception("controller.scrub_failed")

    def _in_haste(self, snapshot: Snapshot) -> bool:
        busy = (AttemptStatus.STARTING, AttemptStatus.STOPPING)
        return bool(self._applier.running.launching) or any(a.status in busy for a in snapshot.attempts)


def _grouped(commands: Sequence[actions.Command]) -> dict[str, list[actions.Command]]:
    """Commands that must follow each other: those of one attempt, and all starts, in the order of the queue."""
    groups: dict[str, list[actions.Command]] = {}
    for command in commands:
        key = type(command).__name__ if isinstance(command, QUEUE) else getattr(command, "attempt_id", "")
        groups.setdefault(key, []).append(command)
    return groups


def _rank_changes(state: AttemptState, loaded: loading.Loaded, now: datetime, signs: bool) -> list[RankChange]:
    """What of the observed ranks is new, and the signs of life when it is time for them."""
    changes: list[RankChange] = []
    rows = {row.rank: row for row in loaded.ranks.get(state.attempt_id, [])}
    for seen in state.ranks:
        row = rows.get(seen.rank)
        if row is None:
            continue
        values: dict[str, object] = {
            "status": seen.status,
            "node": seen.node_id or row.node,
            "pid": seen.pid or row.pid,
            "start_ticks": seen.start_ticks or row.start_ticks,
        }
        different = {name: value for name, value in values.items() if getattr(row, name) != value}
        if row.result is None and seen.result is not None:
            different["result"] = seen.result.model_dump(mode="json")
        if signs and seen.status == "running":
            different["heartbeat_at"] = now - timedelta(seconds=seen.heartbeat_age_seconds)
        if different:
            changes.append(RankChange(state.attempt_id, seen.rank, different))
    return changes
