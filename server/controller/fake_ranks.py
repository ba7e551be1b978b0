"""Simulated ranks: they join, train, save, stop and fail as real ones do, one small move per `advance`.

A fault is scripted before it happens (`Fault("raise", rank=1, step=7)`) and happens once.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from server.controller import fake_checkpoint
from server.controller.cluster import RankState, RankStatus
from workers.contract import (
    ErrorInfo,
    LaunchOrder,
    LogRecord,
    MemoryRecord,
    PhaseRecord,
    PointsRecord,
    Record,
    ReportBatch,
    ResultRecord,
)
from zero_engine.store import Store

Kind = Literal[
    "raise",  # an exception in user code
    "die",  # ended by SIGKILL
    "exit",  # leaves with exit code 3 and no result
    "lose",  # the rank and its actor vanish
    "hang",  # makes no move any more, at `phase` or after `step`
    "deaf",  # never looks at the stop flag
    "silent",  # trains on, but no sign of life reaches the cluster until `Gang.hear` is called
]
SAMPLE_EVERY = 10  # steps between a rank's samples of memory
PHASES = ("started", "joining", "building", "training")


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong with one rank, once: after `step`, or on entering `phase`."""

    kind: Kind
    rank: int = 0
    step: int = 0
    phase: str | None = None
    code: str | None = None  # of the error of "raise"


@dataclass
class SimulatedRank:
    """One rank: where it is, what it has said, what the server has acknowledged."""

    order: LaunchOrder
    node_id: str
    pid: int
    phase: str | None = None
    step: int = 0
    status: RankStatus = "starting"
    result: ResultRecord | None = None
    spool: list[Record] = field(default_factory=list)  # not yet acknowledged
    sent_seq: int = 0
    in_flight: ReportBatch | None = None  # a numbered batch stays as it is until it is acknowledged
    closed: bool = False
    hung: bool = False
    deaf: bool = False
    silent_since: datetime | None = None

    @property
    def ended(self) -> bool:
        """It will not move again."""
        return self.result is not None or self.status == "lost"

    def say(self, record: Record) -> None:
        """Append to its spool."""
        self.spool.append(record)

    def enter(self, phase: str, at: datetime) -> None:
        """Begin a phase of its life."""
        self.phase, self.status = phase, "running"
        self.say(PhaseRecord.model_validate({"at": at, "phase": phase}))

    def end(self, result: ResultRecord) -> None:
        """It leaves; its result is the last word in its spool."""
        self.result, self.status = result, "exited"
        self.say(result)

    def observed(self, now: datetime) -> RankState:
        """As the cluster shows it."""
        silent = 0.0 if self.silent_since is None else (now - self.silent_since).total_seconds()
        return RankState(
            rank=self.order.rank,
            status=self.status,
            node_id=self.node_id,
            pid=self.pid,
            start_ticks=self.pid,
            result=self.result,
            step=self.step,
            heartbeat_age_seconds=silent,
            reports_closed=self.closed,
        )


@dataclass
class Gang:
    """The ranks of one attempt; they move in step."""

    ranks: list[SimulatedRank]
    store: Store
    faults: list[Fault]
    clock: Callable[[], datetime]
    stopping: bool = False
    saved_step: int = -1

    def advance(self) -> None:
        """One move of every rank that can move."""
        self._break()
        if self._victims():
            return
        living = [r for r in self.ranks if not r.ended]
        if not living or any(r.hung for r in living):
            self._move_alone([r for r in living if not r.hung])
            return
        if all(r.phase in ("training", "saving") for r in living):
            self._train(living)
        else:
            self._move_alone(living)

    def kill(self) -> None:
        """SIGKILL to every rank."""
        for rank in self.ranks:
            if not rank.ended:
                rank.end(ResultRecord(at=self.clock(), outcome="died", step=rank.step, signal=signal.SIGKILL))

    def hear(self) -> None:
        """Signs of life arrive again."""
        for rank in self.ranks:
            rank.silent_since = None

    def _move_alone(self, living: list[SimulatedRank]) -> None:
        """Through the phases up to the first exchange; nobody passes `joining` before all have reached it."""
        joined = all(r.ended or r.phase not in (None, "started") for r in self.ranks)
        for rank in living:
            place = PHASES.index(rank.phase) if rank.phase in PHASES else -1
            if rank.phase == "joining" and (not joined or any(r.hung for r in self.ranks)):
                continue
            if place + 1 < len(PHASES) and not any(r.ended for r in self.ranks):
                rank.enter(PHASES[place + 1], self.clock())
                self._resume(rank)

    def _resume(self, rank: SimulatedRank) -> None:
        if rank.phase == "training" and rank.order.resume is not None:
            rank.step = rank.order.resume.step

    def _train(self, living: list[SimulatedRank]) -> None:
        lead = self.ranks[0]
        spec = lead.order.spec
        stopping = self.stopping and not any(r.deaf for r in living)
        if stopping:
            self._save(living)
            self._leave("stopped")
        elif lead.step >= spec.train.steps:
            self._save(living)
            self._leave("finished")
        else:
            for rank in living:
                rank.step += 1
                self._tell_step(rank)
            every = spec.checkpoint.every
            if every and lead.step % every == 0:
                self._save(living)

    def _tell_step(self, rank: SimulatedRank) -> None:
        at = self.clock()
        if rank.step % SAMPLE_EVERY == 1:
            rank.say(MemoryRecord(at=at, step=rank.step, params=1024, grads=1024, allocated=2048))
        if rank.order.rank == 0:
            loss = 0.1 + 3.9 * math.exp(-rank.step / 100)
            values = {"loss": loss, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 1000.0, "seconds": 0.1}
            rank.say(PointsRecord(at=at, step=rank.step, values=values))
            if rank.step % SAMPLE_EVERY == 1:
                rank.say(LogRecord(at=at, stream="stdout", text=f"step {rank.step}\n"))

    def _save(self, living: list[SimulatedRank]) -> None:
        lead = self.ranks[0]
        if lead.step == self.saved_step:
            return
        at = self.clock()
        for rank in living:
            rank.enter("saving", at)
        lead.say(fake_checkpoint.write(self.store, lead.order, lead.step, at))
        self.saved_step = lead.step
        for rank in living:
            rank.enter("training", at)

    def _leave(self, outcome: Literal["finished", "stopped"]) -> None:
        for rank in self.ranks:
            digest = f"{rank.step:016x}"
            rank.end(ResultRecord(at=self.clock(), outcome=outcome, step=rank.step, digest=digest, exit_code=0))

    def _victims(self) -> bool:
        """Ranks whose peer has failed notice it at their next exchange."""
        failed = [r for r in self.ranks if r.status == "lost" or (r.result and r.result.outcome in ("failed", "died"))]
        if not failed:
            return False
        error = ErrorInfo(type="RuntimeError", message="connection closed by peer", traceback="", code="peer_lost")
        for rank in self.ranks:
            if not rank.ended and not rank.hung:
                rank.end(ResultRecord(at=self.clock(), outcome="failed", step=rank.step, error=error, exit_code=1))
        return True

    def _break(self) -> None:
        for fault in list(self.faults):
            rank = self.ranks[fault.rank] if fault.rank < len(self.ranks) else None
            if rank is None or rank.ended or not _due(fault, rank):
                continue
            self.faults.remove(fault)
            self._strike(fault, rank)

    def _strike(self, fault: Fault, rank: SimulatedRank) -> None:
        at, step = self.clock(), rank.step
        match fault.kind:
            case "raise":
                trace = "Traceback (most recent call last):\nValueError: scripted"
                error = ErrorInfo(type="ValueError", message="scripted", traceback=trace, code=fault.code)
                rank.end(ResultRecord(at=at, outcome="failed", step=step, error=error, exit_code=1))
            case "die":
                rank.end(ResultRecord(at=at, outcome="died", step=step, signal=signal.SIGKILL))
            case "exit":
                rank.end(ResultRecord(at=at, outcome="died", step=step, exit_code=3))
            case "lose":
                rank.status, rank.spool, rank.in_flight = "lost", [], None
            case "hang":
                rank.hung = True
            case "deaf":
                rank.deaf = True
            case "silent":
                rank.silent_since = at


def _due(fault: Fault, rank: SimulatedRank) -> bool:
    if fault.phase is not None:
        return rank.phase == fault.phase
    return rank.phase in ("training", "saving") and rank.step >= fault.step
