"""A store that lets somebody know that its writers get something done: a slow save is told from one that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from zero_engine.fetcher import Filled, Part
from zero_engine.store import Bytes, ErrorType, Store, Writer

BEAT_SECONDS = 5.0  # at most one call in so many


class Beating:
    """Another store, as it is; `beat` is called now and then while bytes are written."""

    def __init__(self, store: Store, beat: Callable[[], None]) -> None:
        self._store, self._beat = store, beat
        self._next = time.monotonic() + BEAT_SECONDS
        self.read_bytes = store.read_bytes

    @property
    def url(self) -> str:
        return self._store.url

    def moved(self) -> None:
        """Something was written."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + BEAT_SECONDS
            self._beat()

    def create(self, key: str) -> Writer:
        return _BeatingWriter(self._store.create(key), self.moved)

    def put(self, key: str, data: Bytes) -> None:
        self._store.put(key, data)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._store.read_into(key, offset, buffer)

    def read_parts(self, key: str, parts: Sequence[Part], filled: Filled, alone: bool) -> None:
        self._store.read_parts(key, parts, filled, alone)

    def size(self, key: str) -> int:
        return self._store.size(key)

    def list(self, prefix: str = "") -> Iterator[str]:
        return self._store.list(prefix)

    def folders(self) -> Iterator[str]:
        return self._store.folders()

    def loose(self) -> Iterator[str]:
        return self._store.loose()

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def delete_unfinished(self, prefix: str) -> None:
        self._store.delete_unfinished(prefix)

    def probe(self) -> None:
        self._store.probe()


class _BeatingWriter:
    """An object being written; each piece counts."""

    def __init__(self, writer: Writer, moved: Callable[[], None]) -> None:
        self._writer, self._moved = writer, moved

    def write(self, data: Bytes) -> None:
        self._writer.write(data)
        self._moved()

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None:
        self._writer.__exit__(kind, error, trace)
