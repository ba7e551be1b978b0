"""From the records of N ranks to what `shardyard run` says: one line per optimizer step, and a summary. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from workers.contract import (
    CheckpointRecord,
    EventRecord,
    LedgerRecord,
    MemoryRecord,
    PlanRecord,
    PointsRecord,
    Record,
    write_number,
)
from workers.planner import StagePlan
from workers.reporter import DIGEST_ACTION

FIELDS = ("params", "grads", "sums", "master", "moments", "buckets", "slots", "pinned", "other")
CATEGORIES = {"params": "parameters", "grads": "gradients"}  # the plan's names; the other fields have the same


def owned_bytes(record: MemoryRecord) -> dict[str, int]:
    """A record under the plan's names; as in the plan, "pinned" only where something is."""
    owned = {CATEGORIES.get(name, name): int(getattr(record, name)) for name in FIELDS}
    return {name: count for name, count in owned.items() if count or name != "pinned"}


@dataclass(frozen=True)
class StepLine:
    """One optimizer step of the whole run."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int  # of this step
    seconds: float  # of the whole step
    bytes_sent: int  # by all ranks
    memory_bytes: dict[str, int]  # by category, of the largest rank
    chunk: int
    digest: str | None
    eval_loss: float | None

    def as_json(self) -> dict[str, Any]:
        """The line's object; digest and eval_loss stand where there is one."""
        line: dict[str, Any] = {
            "step": self.step,
            "loss": write_number(self.loss),
            "grad_norm": write_number(self.grad_norm),
            "lr": self.lr,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "bytes_sent": self.bytes_sent,
            "memory_bytes": self.memory_bytes,
            "chunk": self.chunk,
        }
        if self.digest is not None:
            line["digest"] = self.digest
        if self.eval_loss is not None:
            line["eval_loss"] = write_number(self.eval_loss)
        return line


@dataclass
class _Open:
    """A step of which not everything has been heard."""

    points: dict[str, float] = field(default_factory=dict)
    memory: dict[int, dict[str, int]] = field(default_factory=dict)  # by rank
    ledger: dict[int, LedgerRecord] = field(default_factory=dict)  # by rank


@dataclass
class Lines:
    """Puts steps together as records arrive in any order of the ranks."""

    ranks: int
    chunk: int
    plan: PlanRecord | None = None
    eval_before: float | None = None
    last: StepLine | None = None
    checkpoints: list[str] = field(default_factory=list)
    events: list[EventRecord] = field(default_factory=list)
    memory: list[dict[str, int]] = field(default_factory=list)  # of the last step, rank by rank
    rss: list[int] = field(default_factory=list)  # largest seen, rank by rank
    ledger: list[dict[str, int]] = field(default_factory=list)  # of the last step, rank by rank
    seconds: float = 0.0  # of all steps
    step_seconds: list[float] = field(default_factory=list)
    predicted: StagePlan | None = None  # what the planner made of the run's own stage
    tokens: int = 0
    eval_loss: float | None = None
    _steps: dict[int, _Open] = field(default_factory=dict)
    _digests: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rss = [0] * self.ranks

    def take(self, rank: int, record: Record) -> StepLine | None:
        """One record; the line that it completes, if any."""
        match record:
            case PointsRecord(step=0):
                self.eval_before = record.values.get("eval_loss")
            case PointsRecord():
                self._steps.setdefault(record.step, _Open()).points = dict(record.values)
                return self._completed(record.step)
            case MemoryRecord(phase="peak"):
                owned = owned_bytes(record)
                self._steps.setdefault(record.step, _Open()).memory[rank] = owned
                self.rss[rank] = max(self.rss[rank], record.rss)
            case LedgerRecord():
                self._steps.setdefault(record.step, _Open()).ledger[rank] = record
                return self._completed(record.step)
            case PlanRecord():
                self.plan = record
            case CheckpointRecord():
                self.checkpoints.append(record.folder)
            case EventRecord(action=action) if action == DIGEST_ACTION:
                self._digests[int(record.data["step"])] = str(record.data["digest"])
            case EventRecord():
                self.events.append(record)
        return None

    def _completed(self, step: int) -> StepLine | None:
        heard = self._steps[step]
        if not heard.points or len(heard.ledger) < self.ranks or len(heard.memory) < self.ranks:
            return None
        del self._steps[step]
        points = heard.points
        self.memory = [heard.memory[rank] for rank in range(self.ranks)]
        self.ledger = [dict(heard.ledger[rank].bytes) for rank in range(self.ranks)]
        tokens = round(points["tokens_per_second"] * points["seconds"])
        self.seconds += points["seconds"]
        self.step_seconds.append(points["seconds"])
        self.tokens += tokens
        self.eval_loss = points.get("eval_loss", self.eval_loss)
        self.last = StepLine(
            step=step,
            loss=points["loss"],
            grad_norm=points["grad_norm"],
            lr=points["lr"],
            tokens=tokens,
            seconds=points["seconds"],
            bytes_sent=sum(sum(row.values()) for row in self.ledger),
            memory_bytes=max(self.memory, key=lambda row: sum(row.values())),
            chunk=self.chunk,
            digest=self._digests.pop(step, None),
            eval_loss=points.get("eval_loss"),
        )
        return self.last

    def _against_prediction(self) -> dict[str, Any] | None:
        """The median step beside the predicted one; None before the first step."""
        if not self.step_seconds:
            return None
        measured, planned = median(self.step_seconds), self.predicted.step_seconds if self.predicted else None
        return {
            "measured": measured,
            "predicted": None if planned is None else planned.model_dump(),
            "error": None if planned is None else planned.total / measured - 1,
        }

    def summary(self, outcome: str, digest: str | None, step: int = 0) -> dict[str, Any]:
        """What the run came to: the plan beside what was measured. `step`: where it stands if it made none."""
        plan = self.plan
        return {
            "outcome": outcome,
            "step": self.last.step if self.last else step,
            "ranks": self.ranks,
            "stage": plan.stage if plan else None,
            "chunk": self.chunk,
            "parameters": plan.parameters if plan else None,
            "plan": {"memory_bytes": plan.memory, "traffic_bytes": plan.traffic} if plan else None,
            "memory_bytes": self.memory,
            "peak_rss_bytes": self.rss,
            "ledger_bytes": self.ledger,
            "loss": write_number(self.last.loss) if self.last else None,
            "eval_loss_before": None if self.eval_before is None else write_number(self.eval_before),
            "eval_loss": None if self.eval_loss is None else write_number(self.eval_loss),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "step_seconds": self._against_prediction(),
            "digest": digest,
            "checkpoints": self.checkpoints,
        }
