"""The ranks of a node, one small private file each: what an agent needs when a rank's actor has died.

The actor writes its entry before it starts a rank; the entry goes when the attempt is released. Standard library only.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from workers.process_table import ProcessId
from workers.rank_process import write_atomically


@dataclass(frozen=True)
class Entry:
    """One rank of this node. `report_token` is a secret: files are mode 0600."""

    job_id: str
    attempt_id: str
    fence: int
    rank: int
    folder: str  # the rank's folder
    report_url: str
    report_token: str
    actor: ProcessId
    process: ProcessId | None = None  # the rank itself, once forked
    closed: bool = False  # everything was acknowledged by the server, or the server has forgotten the attempt

    @property
    def mark(self) -> dict[str, str]:
        """The environment mark of the rank and its children."""
        return rank_mark(self.attempt_id, self.rank)


def rank_mark(attempt_id: str, rank: int) -> dict[str, str]:
    """The environment mark of one rank (names as in `zygote.MARKS`)."""
    return {"SHARDYARD_ATTEMPT": attempt_id, "SHARDYARD_RANK": str(rank)}


class Register:
    """The entries of one node, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, entry: Entry) -> None:
        write_atomically(self._path(entry.attempt_id, entry.rank), json.dumps(asdict(entry)))

    def read(self, attempt_id: str, rank: int) -> Entry | None:
        return _load(self._path(attempt_id, rank))

    def entries(self, attempt_id: str | None = None) -> Iterator[Entry]:
        """All entries, or those of one attempt."""
        for path in sorted(self.folder.glob("*.json" if attempt_id is None else f"{attempt_id}.*.json")):
            entry = _load(path)
            if entry is not None:
                yield entry

    def update(self, attempt_id: str, rank: int, **changes: Any) -> None:
        """Change fields of an entry, unless it was forgotten, also by another process a moment ago."""
        with self._alone():
            entry = self.read(attempt_id, rank)
            if entry is not None:
                self.write(replace(entry, **changes))

    def redirect(self, attempt_id: str, report_url: str) -> None:
        """Reports of an attempt go to another server address from now on."""
        for entry in list(self.entries(attempt_id)):
            self.update(attempt_id, entry.rank, report_url=report_url)

    def forget(self, attempt_id: str) -> None:
        with self._alone():
            for entry in list(self.entries(attempt_id)):
                self._path(attempt_id, entry.rank).unlink(missing_ok=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else updates or forgets meanwhile: a lock on the folder, which the kernel drops with its holder."""
        held = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield
        finally:
            os.close(held)

    def _path(self, attempt_id: str, rank: int) -> Path:
        assert "/" not in attempt_id and not attempt_id.startswith("."), attempt_id
        return self.folder / f"{attempt_id}.{rank}.json"


def _load(path: Path) -> Entry | None:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        data["actor"] = ProcessId(**data["actor"])
        data["process"] = ProcessId(**data["process"]) if data["process"] else None
        return Entry(**data)
    except (OSError, ValueError, TypeError, KeyError):
        return None
