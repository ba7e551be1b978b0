"""Where checkpoint bytes live: the `Store` protocol and the local folder. Torch-free.

A key is a relative path with forward slashes ("step-0000000050-attempt-000003/manifest.json"). An object appears under
its key whole and durable, or not at all: a reader never sees half of one, whenever the writer was killed. The
S3 store behind the same protocol is `workers/object_store.py`; both pass tests/unit/test_store_conformance.py.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from zero_engine.appender import Appender
from zero_engine.fetcher import Fetcher, Filled, Part
from zero_engine.file_calls import FileCalls

Bytes = bytes | bytearray | memoryview
ErrorType = type[BaseException] | None

TEMPORARY = ".tmp-"  # prefix of files that are not objects yet


class StoreError(Exception):
    """A store could not do what was asked. `code` is stable; the sentence says which key and what to do."""

    code = "store_failed"


class NotFound(StoreError):
    """No object has this key."""

    code = "store_not_found"


class StoreFull(StoreError):
    """No space or quota left; nothing was published."""

    code = "store_full"


class StoreDenied(StoreError):
    """Read-only, or the credentials do not allow it."""

    code = "store_denied"


class StoreAway(StoreError):
    """The store cannot be reached now, after all retries: says nothing about what it holds. Try again later."""

    code = "store_away"


class Writer(Protocol):
    """An object being written. Leaving the `with` block normally commits it; an exception leaves nothing behind."""

    def write(self, data: Bytes) -> None:
        """Append bytes. The buffer may be reused when the call returns."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None: ...


class Store(Protocol):
    """A flat space of immutable objects. Every method raises `StoreError` or one of its subclasses."""

    read_bytes: int  # of a good range read: what is verified at once lies in the processor's cache, or pays for a trip

    @property
    def url(self) -> str:
        """Where this is, without credentials: for messages and rows."""

    def create(self, key: str) -> Writer:
        """Begin an object. When its `with` block ends it is durable and replaces what had the key."""

    def put(self, key: str, data: Bytes) -> None:
        """Create a small object in one call."""

    def get(self, key: str) -> bytes:
        """A whole small object."""

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (bytes, writable) from `offset` on. An object that is too short is a StoreError."""

    def read_parts(self, key: str, parts: Sequence[Part], filled: Filled, alone: bool) -> None:
        """`read_into` for every part, none of them empty, in order of their places: one way through the object.

        `filled` is told the number of each part before the next is touched, which may have the same memory. `alone`:
        nobody else reads these bytes at this time, so that no cache needs to keep them.
        """

    def size(self, key: str) -> int:
        """Bytes of an object."""

    def list(self, prefix: str = "") -> Iterator[str]:
        """All keys below a folder ("" or "a/b/"), in no order. Unfinished objects are not listed."""

    def folders(self) -> Iterator[str]:
        """First components of the keys, each once, in no order."""

    def loose(self) -> Iterator[str]:
        """Keys in no folder, in no order. Unfinished objects are not listed."""

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""

    def delete_unfinished(self, prefix: str) -> None:
        """Remove what writers killed half-way left below a folder ("a/b/"), and the folder if it is then empty."""

    def probe(self) -> None:
        """Begin an object and drop it: raises what would keep a save from being written."""


class LocalStore:
    """Objects as files below one folder. Atomic by rename, durable by fsync of the file and of its folder."""

    read_bytes = 2**20

    def __init__(self, root: str | os.PathLike[str], files: FileCalls | None = None) -> None:
        self.root = Path(root).absolute()
        self.files = files or FileCalls()

    @property
    def url(self) -> str:
        return str(self.root)

    def create(self, key: str) -> _FileWriter:
        path = self._path(key)
        with _translated(key):
            self._make_folders(path.parent)
            return _FileWriter(key, path, self.files)

    def put(self, key: str, data: Bytes) -> None:
        with self.create(key) as writer:
            writer.write(data)

    def get(self, key: str) -> bytes:
        with _translated(key):
            return self._path(key).read_bytes()

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.read_parts(key, [Part(offset, buffer.cast("B"))], lambda number: None, alone=False)

    def read_parts(self, key: str, parts: Sequence[Part], filled: Filled, alone: bool) -> None:
        with _translated(key):
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                Fetcher(descriptor, self.files).fetch(parts, filled, alone)
            finally:
                os.close(descriptor)

    def size(self, key: str) -> int:
        with _translated(key):
            return self._path(key).stat().st_size

    def list(self, prefix: str = "") -> Iterator[str]:
        base = self._path(prefix.rstrip("/")) if prefix else self.root
        for folder, _, names in os.walk(base):
            for name in names:
                if not name.startswith(TEMPORARY):
                    yield (Path(folder) / name).relative_to(self.root).as_posix()

    def folders(self) -> Iterator[str]:
        if self.root.is_dir():
            with _translated(""):
                yield from (entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False))

    def loose(self) -> Iterator[str]:
        if self.root.is_dir():
            with _translated(""):
                names = [entry.name for entry in os.scandir(self.root) if not entry.is_dir(follow_symlinks=False)]
            yield from (name for name in names if not name.startswith(TEMPORARY))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _translated(key):
            if path.exists():
                self.files.unlink(path)
                _sync_folder(path.parent, self.files)

    def delete_unfinished(self, prefix: str) -> None:
        base = self._path(prefix.rstrip("/"))
        with _translated(prefix):
            for folder, _, names in os.walk(base, topdown=False):
                for name in names:
                    if name.startswith(TEMPORARY):
                        self.files.unlink(Path(folder) / name)
                if not any(os.scandir(folder)):
                    self.files.remove_folder(Path(folder))

    def probe(self) -> None:
        with _translated(str(self.root)):
            self._make_folders(self.root)
            path = self.root / f"{TEMPORARY}probe-{secrets.token_hex(4)}"
            self.files.close(self.files.open(path))
            self.files.unlink(path)

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _make_folders(self, folder: Path) -> None:
        """Create what is missing, each new name synced into its parent."""
        if folder.is_dir():
            return
        self._make_folders(folder.parent)
        try:
            self.files.make_folder(folder)
        except FileExistsError:
            return  # another rank was faster
        _sync_folder(folder.parent, self.files)


class _FileWriter:
    """Writes beside the target under a temporary name; commit is fsync, rename, fsync of the folder."""

    def __init__(self, key: str, path: Path, files: FileCalls) -> None:
        self._key, self._path, self._files = key, path, files
        self._temporary = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")
        self._descriptor = files.open(self._temporary)
        self._appender = Appender(self._descriptor, files)

    def write(self, data: Bytes) -> None:
        with _translated(self._key):
            self._appender.append(memoryview(data).cast("B"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._abandon()
            return
        try:
            with _translated(self._key):
                self._appender.finish()
                self._files.sync(self._descriptor)
                self._files.rename(self._temporary, self._path)
                _sync_folder(self._path.parent, self._files)
        except StoreError:
            self._abandon()
            raise
        self._appender.stop()
        self._files.close(self._descriptor)

    def _abandon(self) -> None:
        self._appender.stop()
        self._files.close(self._descriptor)
        if self._temporary.exists():
            self._files.unlink(self._temporary)


@contextmanager
def _translated(key: str) -> Iterator[None]:
    """Turns an OSError about a key into the store's own errors."""
    try:
        yield
    except OSError as error:
        raise _translation(key, error) from error


def _translation(key: str, error: OSError) -> StoreError:
    return _ERRORS.get(error.errno or 0, StoreError)(f"{key}: {error.strerror or error}")


_ERRORS: dict[int, type[StoreError]] = {
    errno.ENOENT: NotFound,
    errno.ENOTDIR: NotFound,
    errno.ENOSPC: StoreFull,
    errno.EDQUOT: StoreFull,
    errno.EFBIG: StoreFull,
    errno.EROFS: StoreDenied,
    errno.EACCES: StoreDenied,
    errno.EPERM: StoreDenied,
}


@lru_cache(1024)
def check_key(key: str) -> str:
    """The key itself, or an error when it could leave the store or hide in it."""
    parts = key.split("/")
    if any(part in ("", ".", "..") or part.startswith(TEMPORARY) or "\0" in part for part in parts):
        raise StoreError(f"{key!r} is not a key: use relative names joined by single slashes")
    return key


def as_store(place: Store | str | os.PathLike[str]) -> Store:
    """A Store as it is; a path as a LocalStore."""
    return LocalStore(place) if isinstance(place, str | os.PathLike) else place


def require_writable(store: Store) -> None:
    """Raises StoreDenied when no save can be written. One that is full or away may be well again when a save comes."""
    try:
        store.probe()
    except (StoreFull, StoreAway):
        return
    except StoreError as error:
        raise StoreDenied(
            f"checkpoints cannot be written ({error}): let this user write to {store.url}, or name another place"
        ) from error


def _sync_folder(folder: Path, files: FileCalls) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        files.sync(descriptor)
    finally:
        os.close(descriptor)
