"""Stores that fail or kill at a chosen call, importable in rank and writer processes."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.counted_calls import CountedCalls
from zero_engine.fetcher import Filled, Part
from zero_engine.file_calls import FileCalls
from zero_engine.store import LocalStore, StoreAway, Writer


@dataclass
class KilledAt(CountedCalls):
    """kill -9 before the call after the allowed ones, the last of which is torn. Spares the process that made it."""

    write_bytes = 16384
    maker: int = field(default_factory=os.getpid)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def count(self) -> None:
        if os.getpid() != self.maker:
            super().count()

    def write(self, descriptor: int, data: memoryview) -> int:
        torn = self.allowed == 1 and os.getpid() != self.maker
        return super().write(descriptor, data[: max(1, len(data) // 2)] if torn else data)  # half of it arrives


@dataclass
class FullAfter(FileCalls):
    """A disk with room for so many bytes."""

    room: int

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.room <= 0:
            raise OSError(28, "No space left on device")
        data = data[: self.room]
        self.room -= len(data)
        return super().write(descriptor, data)


@dataclass
class Denied(FileCalls):
    """A store that takes nothing any more, for a reason of the kernel's: by default it was made read-only."""

    reason: int = errno.EROFS

    def open(self, path: Path) -> int:
        raise OSError(self.reason, os.strerror(self.reason))

    def make_folder(self, path: Path) -> None:
        raise OSError(self.reason, os.strerror(self.reason))


class Counting(LocalStore):
    """Counts the bytes that are read."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.bytes_read: dict[str, int] = {}

    def read_parts(self, key: str, parts: Sequence[Part], filled: Filled, alone: bool) -> None:
        super().read_parts(key, parts, filled, alone)
        name = key.rsplit("/", 1)[1]
        self.bytes_read[name] = self.bytes_read.get(name, 0) + sum(len(part.buffer) for part in parts)


class Vanishing(LocalStore):
    """Another process deletes a shard while its checkpoint is read."""

    def __init__(self, root: str, after: int) -> None:
        super().__init__(root)
        self.after = after  # shards that are read before

    def read_parts(self, key: str, parts: Sequence[Part], filled: Filled, alone: bool) -> None:
        self.after -= 1
        if self.after == -1:
            (self.root / key).unlink(missing_ok=True)
        super().read_parts(key, parts, filled, alone)


class Away(LocalStore):
    """A store that stops answering when so many shards are read."""

    def __init__(self, root: str, after: int) -> None:
        super().__init__(root)
        self.after = after

    def read_parts(self, key: str, parts: Sequence[Part], filled: Filled, alone: bool) -> None:
        self.after -= 1
        if self.after < 0:
            raise StoreAway(f"{key}: the store does not answer")
        super().read_parts(key, parts, filled, alone)


class GatedStore(LocalStore):
    """Shards are not begun before the gate, a file beside them, is there."""

    def __init__(self, root: str, gate: str) -> None:
        super().__init__(root)
        self._gate = self.root / gate

    def open_gate(self) -> None:
        self.root.mkdir(exist_ok=True)
        self._gate.touch()

    def create(self, key: str) -> Writer:
        while key.endswith(".safetensors") and not self._gate.exists():
            time.sleep(0.005)
        return super().create(key)
