"""A cluster of simulated ranks in this process, for tests and for looking around without Ray (setting `fake_cluster`).

It passes the same conformance tests as `RayCluster`: attempts outlive the controller, reports are numbered, repeated
and applied once, a lost answer may have launched. Time passes only in `advance`.
"""

from __future__ import annotations

import http.client
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from urllib.parse import urlsplit

from server.controller.cluster import AttemptState, ClusterState, ClusterUnavailable, Launch, NoCapacity, Node
from server.controller.fake_ranks import Fault, Gang, SimulatedRank
from server.db import utc_now
from workers.contract import AttemptId, ReportBatch, ReportReply
from zero_engine.store import LocalStore, Store

BATCH_RECORDS = 1000
Send = Callable[[str, str, ReportBatch], int]  # (url, token, batch) -> highest seq applied; OSError: not now


def cpu_node(node_id: str, slots: int) -> Node:
    """A machine without GPUs."""
    return Node(node_id, "127.0.0.1", True, "cpu", slots, slots, 8 * 2**30, 8 * 2**30 // slots)


@dataclass
class Living:
    """One attempt on the cluster."""

    launch: Launch
    gang: Gang
    report_url: str
    report_token: str


@dataclass
class FakeCluster:
    """See the protocol `Cluster` for the public methods; the rest scripts what goes wrong."""

    nodes: tuple[Node, ...]
    send: Send
    open_store: Callable[[str], Store] = LocalStore
    clock: Callable[[], datetime] = utc_now
    report_every: int = 1  # moves
    faults: list[Fault] = field(default_factory=list)  # taken by the next launch
    down: bool = False  # nothing answers
    lose_next_answer: bool = False  # the next launch happens and its answer does not arrive
    refuse_next: Exception | None = None  # the next launch raises this, and nothing is started
    num_launches: int = 0
    num_moves: int = 0
    _living: dict[AttemptId, Living] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _pids: itertools.count[int] = field(default_factory=lambda: itertools.count(10_000))

    def observe(self) -> ClusterState:
        with self._lock:
            self._check_up()
            used = self._used()
            nodes = tuple(replace(n, free_slots=n.slots - used.get(n.id, 0) if n.alive else 0) for n in self.nodes)
            return ClusterState(nodes, tuple(self._state(living) for living in self._living.values()))

    def launch(self, launch: Launch) -> None:
        with self._lock:
            self._check_up()
            if self.refuse_next is not None:
                refusal, self.refuse_next = self.refuse_next, None
                raise refusal
            if launch.attempt_id not in self._living:
                self._living[launch.attempt_id] = self._start(launch)
                self.num_launches += 1
            if self.lose_next_answer:
                self.lose_next_answer = False
                raise ClusterUnavailable("the answer was lost")

    def adopt(self, attempt_id: AttemptId, report_url: str) -> None:
        with self._lock:
            self._check_up()
            if attempt_id in self._living:
                self._living[attempt_id].report_url = report_url

    def request_stop(self, attempt_id: AttemptId) -> None:
        with self._lock:
            self._check_up()
            if attempt_id in self._living:
                self._living[attempt_id].gang.stopping = True

    def kill(self, attempt_id: AttemptId) -> None:
        with self._lock:
            self._check_up()
            if attempt_id in self._living:
                self._living[attempt_id].gang.kill()

    def release(self, attempt_id: AttemptId) -> None:
        with self._lock:
            self._check_up()
            self._living.pop(attempt_id, None)

    def close(self) -> None:
        """Nothing is held."""

    def advance(self) -> None:
        """One move of every rank, then, when it is time, one try to send what each has to say."""
        with self._lock:
            for living in self._living.values():
                living.gang.advance()
            self.num_moves += 1
            talking = self._living.values() if self.num_moves % self.report_every == 0 else ()
            ranks = [(living, rank) for living in talking for rank in living.gang.ranks]
        for living, rank in ranks:
            self._report(living, rank)

    def lose_everything(self) -> None:
        """The cluster's head is restarted: no attempt is left."""
        with self._lock:
            self._living.clear()

    def gang(self, attempt_id: AttemptId) -> Gang:
        """The ranks of an attempt."""
        return self._living[attempt_id].gang

    @property
    def attempts(self) -> tuple[AttemptId, ...]:
        """What exists."""
        return tuple(self._living)

    def _check_up(self) -> None:
        if self.down:
            raise ClusterUnavailable("the fake cluster is down")

    def _used(self) -> dict[str, int]:
        used: dict[str, int] = {}
        for living in self._living.values():
            for rank in living.gang.ranks:
                used[rank.node_id] = used.get(rank.node_id, 0) + 1
        return used

    def _start(self, launch: Launch) -> Living:
        used = self._used()
        device = launch.orders[0].device
        nodes = [n for n in self.nodes if n.alive and n.device == device]
        slots = [n.id for n in nodes for _ in range(n.slots - used.get(n.id, 0))]
        if len(slots) < len(launch.orders):
            raise NoCapacity(f"{len(launch.orders)} slots wanted, {len(slots)} free")
        ranks = [SimulatedRank(o, node, next(self._pids)) for o, node in zip(launch.orders, slots, strict=False)]
        faults, self.faults = self.faults, []
        gang = Gang(ranks, self.open_store(launch.orders[0].store_url), faults, self.clock)
        return Living(launch, gang, launch.report_url, launch.report_token)

    def _state(self, living: Living) -> AttemptState:
        launch, now = living.launch, self.clock()
        ranks = tuple(rank.observed(now) for rank in living.gang.ranks)
        return AttemptState(launch.attempt_id, launch.job_id, launch.fence, ranks)

    def _report(self, living: Living, rank: SimulatedRank) -> None:
        if rank.in_flight is None:
            rank.in_flight = self._next_batch(rank)
        if rank.in_flight is None:
            return
        try:
            applied = self.send(living.report_url, living.report_token, rank.in_flight)
        except OSError:
            return
        if applied >= rank.in_flight.seq:
            rank.sent_seq, rank.closed = rank.in_flight.seq, rank.closed or rank.in_flight.closed
            rank.in_flight = None

    def _next_batch(self, rank: SimulatedRank) -> ReportBatch | None:
        with self._lock:
            records, rank.spool = rank.spool[:BATCH_RECORDS], rank.spool[BATCH_RECORDS:]
            closing = rank.result is not None and not rank.spool and not rank.closed
            if not records and not closing:
                return None
            order = rank.order
            return ReportBatch(
                attempt_id=order.attempt_id,
                fence=order.fence,
                rank=order.rank,
                seq=rank.sent_seq + 1,
                records=records,
                closed=closing,
            )


def send_over_http(url: str, token: str, batch: ReportBatch) -> int:
    """As a rank's actor sends: one POST. Raises OSError when the server is away or refuses."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=10)
    try:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection.request("POST", parts.path, batch.model_dump_json().encode(), headers)
        response = connection.getresponse()
        body = response.read()
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()
    if response.status != 200:
        raise OSError(f"reports were answered with {response.status}: {body[:200]!r}")
    return ReportReply.model_validate_json(body).applied_seq
