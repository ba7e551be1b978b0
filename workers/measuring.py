"""Memory and traffic of a rank as it trains: read now and then, always at the last step."""

from __future__ import annotations

import resource
import time

import torch

from workers.contract import LedgerRecord, MemoryRecord
from workers.reporter import Reporter
from zero_engine import Engine, StepResult

FIELDS = {  # of the engine's categories in a MemoryRecord
    "parameters": "params",
    "gradients": "grads",
    "sums": "sums",
    "master": "master",
    "moments": "moments",
    "buckets": "buckets",
    "slots": "slots",
    "other": "other",
}
CATEGORIES = {field: category for category, field in FIELDS.items()}
_PAGE_BYTES = resource.getpagesize()


class Sampler:
    """Writes a memory and a ledger record when enough time has passed since the last ones."""

    def __init__(self, engine: Engine, reporter: Reporter, seconds: float) -> None:
        self._engine, self._reporter, self._seconds = engine, reporter, seconds
        self._last = -1e9

    def sample(self, step: int, result: StepResult, always: bool) -> None:
        """After a step. `always`: whatever the time."""
        now = time.monotonic()
        if not always and now - self._last < self._seconds:
            return
        self._last = now
        reporter, ledger = self._reporter, self._engine.ledger()
        at = reporter.time()
        seconds = {**ledger.seconds, **{f"phase/{phase}": value for phase, value in result.seconds.items()}}
        reporter.add(
            memory_record(self._engine, reporter, step),
            LedgerRecord(at=at, step=step, bytes=dict(ledger.bytes), seconds=seconds),
        )


def memory_record(engine: Engine, reporter: Reporter, step: int) -> MemoryRecord:
    """What the engine owns at the peak of its last step, and what the process and the allocator hold."""
    owned = {FIELDS[category]: count for category, count in engine.memory().items()}
    if engine.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(engine.device)
        owned["allocated"], owned["reserved"] = peak, torch.cuda.max_memory_reserved(engine.device)
        owned["activations"] = max(0, peak - sum(engine.memory().values()))
        torch.cuda.reset_peak_memory_stats(engine.device)
    return MemoryRecord(at=reporter.time(), step=step, rss=resident_bytes(), **owned)


def resident_bytes() -> int:
    """Resident memory of this process now."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def peak_resident_bytes() -> int:
    """The most that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
