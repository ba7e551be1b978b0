"""How far a rank has come, read from its spool without waiting for the server."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

LOOK_BYTES = 1 << 16
ALIVE = b'"kind":"alive"'
STEP_KINDS = ("points", "memory", "ledger")  # only rank 0 sends points; every rank samples the others


class SpoolProgress:
    """The last step and phase that a rank wrote, when it last wrote, and when it last told of more than being alive."""

    def __init__(self, spool: Path) -> None:
        self.spool = spool
        self.step = 0
        self.phase = ""
        self.heard_at = self.moved_at = time.monotonic()
        self._offset = 0

    def look(self) -> None:
        """Read what was added; of a large addition only the end."""
        try:
            size = self.spool.stat().st_size
        except FileNotFoundError:
            return
        if size == self._offset:
            return
        self.heard_at = time.monotonic()
        start = max(self._offset, size - LOOK_BYTES)
        with self.spool.open("rb") as file:
            data = os.pread(file.fileno(), size - start, start)
        end = data.rfind(b"\n") + 1
        lines = data[:end].splitlines()
        if any(ALIVE not in line for line in lines):
            self.moved_at = self.heard_at
        for line in lines:
            self._take(line)
        self._offset = start + end if end else self._offset

    def age_seconds(self) -> float:
        """Seconds since the rank last wrote a record."""
        return time.monotonic() - self.heard_at

    def idle_seconds(self) -> float:
        """Seconds since the rank last did anything but live."""
        return time.monotonic() - self.moved_at

    def _take(self, line: bytes) -> None:
        if b'"phase"' not in line and b'"step"' not in line:
            return
        try:
            record = json.loads(line)
        except ValueError:  # the first line of a cut-off addition
            return
        if record.get("kind") == "phase":
            self.phase = str(record.get("phase", ""))
        elif record.get("kind") in STEP_KINDS:
            self.step = max(self.step, int(record.get("step", 0)))
