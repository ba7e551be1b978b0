"""What a rank tells: records appended to its spool file, one JSON line each, and nothing else.

A line is handed to the kernel in one call, so that the tail survives the rank's death; training never waits for more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from workers.contract import (
    RESULT_FILE,
    SPOOL_FILE,
    AliveRecord,
    EventRecord,
    PhaseRecord,
    PointsRecord,
    Record,
    ResultRecord,
    write_number,
)

Phase = Literal["started", "preparing", "joining", "building", "restoring", "training", "saving", "finished"]
ALIVE_SECONDS = 5.0  # between signs of life
DIGEST_ACTION = "run.digest"  # data: step, digest


def now() -> datetime:
    """The wall clock, aware UTC."""
    return datetime.now(UTC)


class Reporter:
    """The spool of one rank."""

    def __init__(self, folder: Path, clock: Callable[[], datetime] = now) -> None:
        self._folder, self._clock = folder, clock
        self._file = os.open(folder / SPOOL_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.step = 0  # last one completed

    def time(self) -> datetime:
        """When a record is made."""
        return self._clock()

    def add(self, *records: Record) -> None:
        """Append records."""
        data = b"".join(record.model_dump_json().encode() + b"\n" for record in records)
        while data:
            data = data[os.write(self._file, data) :]

    def phase(self, phase: Phase) -> None:
        """The rank enters a phase."""
        self.add(PhaseRecord(at=self.time(), phase=phase))

    @contextmanager
    def alive(self) -> Iterator[None]:
        """While the block runs, say now and then that the rank lives, whatever it computes or waits for."""
        done = threading.Event()

        def tell() -> None:
            while not done.wait(ALIVE_SECONDS):
                self.add(AliveRecord(at=self.time()))

        thread = threading.Thread(target=tell, name="shardyard-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def points(self, step: int, values: dict[str, float]) -> None:
        """Values of series at a step."""
        self.add(PointsRecord(at=self.time(), step=step, values=values))

    def event(self, action: str, message: str, **data: Any) -> None:
        """Something a person should know. Numbers in `data` may be non-finite."""
        plain = {name: write_number(value) if isinstance(value, float) else value for name, value in data.items()}
        self.add(EventRecord(at=self.time(), action=action, message=message, data=plain))

    def result(self, result: ResultRecord) -> None:
        """The last record: first the result file, whole or not at all, then the spool."""
        draft = self._folder / f".{RESULT_FILE}.{os.getpid()}"
        with open(draft, "w", encoding="utf-8") as file:
            file.write(result.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self._folder / RESULT_FILE)
        self.add(result)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)
