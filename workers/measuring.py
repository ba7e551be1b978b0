"""Memory and traffic of a rank as it trains: read now and then, always at the last step."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

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
    "pinned": "pinned",
    "other": "other",
    "activations": "activations",
}
WATCH_SECONDS = 30.0  # between steps that are measured phase by phase: on a CPU each operation of such a step is slower
_PAGE_BYTES = resource.getpagesize()


class Sampler:
    """Writes a memory and a ledger record when enough time has passed since the last ones.

    Now and then, and at the first and the last step, a step is watched: then there is a record for each phase too.
    """

    def __init__(
        self, engine: Engine, reporter: Reporter, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine, self._reporter, self._seconds, self._clock = engine, reporter, seconds, clock
        self._last = self._last_watched = -1e9
        self._activations = 0  # at the peak of the step that was watched last

    def prepare(self, last: bool) -> None:
        """Before a step. `last`: whatever the time."""
        if last or self._clock() - self._last_watched >= WATCH_SECONDS:
            self._last_watched = self._clock()
            self._engine.watch_memory()

    def sample(self, step: int, result: StepResult, always: bool) -> None:
        """After a step. `always`: whatever the time."""
        now = self._clock()
        if not (always or result.memory) and now - self._last < self._seconds:
            return
        self._last = now
        reporter, ledger = self._reporter, self._engine.ledger()
        at = reporter.time()
        seconds = {**ledger.seconds, **{f"phase/{phase}": value for phase, value in result.seconds.items()}}
        seconds["phase/hidden"] = result.hidden_seconds
        reporter.add(
            *(self._phase(step, phase, owned) for phase, owned in result.memory.items()),
            self._peak(step, result),
            LedgerRecord(at=at, step=step, bytes=dict(ledger.bytes), seconds=seconds),
        )

    def _phase(self, step: int, phase: str, held: dict[str, int]) -> MemoryRecord:
        """What one phase of a watched step held at its peak."""
        return self._record(step, phase, held, {"allocated": self._on_device(held)})

    def _peak(self, step: int, result: StepResult) -> MemoryRecord:
        """What the engine owns, the most that a step held beside it, and what process and allocator hold."""
        device, owned, process = self._engine.device, self._engine.memory(), {"rss": resident_bytes()}
        if result.memory:
            self._activations = max(row["activations"] for row in result.memory.values())
        if device.type == "cuda":
            if not result.memory:
                self._activations = max(0, torch.cuda.max_memory_allocated(device) - self._on_device(owned))
            process["reserved"] = torch.cuda.max_memory_reserved(device)
            torch.cuda.reset_peak_memory_stats(device)
        process["allocated"] = self._on_device(owned) + self._activations
        return self._record(step, "peak", {**owned, "activations": self._activations}, process)

    def _record(self, step: int, phase: str, held: dict[str, int], process: dict[str, int]) -> MemoryRecord:
        fields = {FIELDS[category]: count for category, count in held.items()}
        at = self._reporter.time()
        return MemoryRecord.model_validate({"at": at, "step": step, "phase": phase, **fields, **process})

    def _on_device(self, held: dict[str, int]) -> int:
        """Bytes of these that stand where the model computes: pinned ones are the host's, on a CPU the same."""
        apart = self._engine.device.type == "cuda"
        return sum(count for category, count in held.items() if not (apart and category == "pinned"))


def resident_bytes() -> int:
    """Resident memory of this process now."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def peak_resident_bytes() -> int:
    """The most that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
