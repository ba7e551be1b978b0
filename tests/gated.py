"""A job that waits, where a test wants to meddle, until the test lets it go on: nothing depends on who is faster.

The model is a user's own. Its training forward stands still once as many were made as its gate, a file, allows; the
bits of a run do not depend on how long it stood.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.contract import STOP_FILE

MODEL = """
import time
from pathlib import Path

from torch import nn


class Gated(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.gate, self.calls = Path(gate), 0

    def forward(self, inputs):
        self.calls += self.training
        while self.calls > int(self.gate.read_text()):
            time.sleep(0.01)
        hidden = self.first(inputs).relu()
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return self.last(hidden)


def build(gate):
    return Gated(gate)
"""
STEPS = 40
STANDS_AFTER = 24  # steps that a new gate lets through
RANKS = 2
MICRO_BATCHES = 4
CHECKPOINT_EVERY = 10


@dataclass(frozen=True)
class Gate:
    """The gate of one job; `spec` shuts it."""

    path: Path

    def spec(self, name: str) -> dict[str, Any]:
        """A job of RANKS ranks at stage 2 that stands after STANDS_AFTER steps."""
        code = self.path.parent / "gated-code"
        code.mkdir(exist_ok=True)
        (code / "gated.py").write_text(MODEL)
        self.allow(STANDS_AFTER)
        return {
            "name": name,
            "model": {
                "kind": "python",
                "entry": "gated:build",
                "path": str(code),
                "kwargs": {"gate": str(self.path)},
            },
            "data": {"kind": "digits"},
            "train": {"steps": STEPS, "global_batch": 16, "micro_batch": 16 // MICRO_BATCHES, "eval": {"every": 0}},
            "zero": {"stage": 2},
            "resources": {"ranks": RANKS},
            "checkpoint": {"every": CHECKPOINT_EVERY},
            "stop_grace_seconds": 600.0,
        }

    def allow(self, steps: int) -> None:
        """Let a process of the job's RANKS ranks complete so many steps."""
        draft = self.path.with_suffix(".draft")
        draft.write_text(str(steps * MICRO_BATCHES // RANKS))
        draft.rename(self.path)

    def open(self) -> None:
        """Let the job go on to its end, on any number of ranks."""
        self.allow(10**6)


def told_to_stop(data_dir: Path, attempt_id: str) -> bool:
    """Whether every rank of an attempt has been asked to leave at its next step boundary."""
    folder = data_dir / "ranks" / attempt_id
    return all((folder / str(rank) / STOP_FILE).exists() for rank in range(RANKS))
