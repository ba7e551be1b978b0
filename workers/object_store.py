"""Object stores behind the engine's `Store` protocol, by url. obstore only: no ray, no torch.

obstore (Rust, no event loop of ours, releases the interpreter lock) was chosen over fsspec with s3fs: multipart uploads
are parallel, and retry with backoff is its own. Credentials come from the environment or the machine's role, as every
S3 client finds them; they are no part of a url and are never logged.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from zero_engine.fetcher import Filled, Part
from zero_engine.store import (
    Bytes,
    ErrorType,
    LocalStore,
    NotFound,
    Store,
    StoreAway,
    StoreDenied,
    StoreError,
    Writer,
    check_key,
)

if TYPE_CHECKING:
    from obstore import WritableFile

PART_BYTES = 16 * 2**20  # of a multipart upload; S3 allows 10,000 parts, so objects up to 160 GB
READ_BYTES = 32 * 2**20  # of a read, as RANGE_BYTES at a time in parallel
RANGE_BYTES = 8 * 2**20
UPLOADS = 4  # parts in flight: bounds the memory of a writer to about UPLOADS * PART_BYTES
PATIENCE = timedelta(minutes=3)  # how long a request is retried before the store counts as away


def open_store(url: str, patience: timedelta = PATIENCE) -> Store:
    """The store of a url: `s3://bucket/prefix`, `file:///folder` or an absolute folder."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise StoreError("a store url carries no credentials; set them in the environment")
    if parts.scheme == "s3":
        return ObjectStore(url, patience)
    if parts.scheme not in ("", "file") or not parts.path.startswith("/"):
        raise StoreError(f"{url!r} is not a store: use s3://bucket/prefix or an absolute folder")
    return LocalStore(parts.path if parts.scheme else url)


class ObjectStore:
    """S3 and what speaks like it. An object appears when its upload completes; there is no rename."""

    read_bytes = READ_BYTES

    def __init__(self, url: str, patience: timedelta = PATIENCE) -> None:
        from obstore.store import from_url

        self._url, self._patience = url.rstrip("/"), patience
        retry: Any = {"max_retries": 1000, "retry_timeout": patience, "backoff": {"max_backoff": timedelta(seconds=2)}}
        with _translated(url):
            self._store: Any = from_url(self._url, retry_config=retry)

    def __reduce__(self) -> tuple[type[ObjectStore], tuple[str, timedelta]]:
        """To the writer process goes the place; it finds the credentials in its own environment."""
        return ObjectStore, (self._url, self._patience)

    @property
    def url(self) -> str:
        return self._url

    def create(self, key: str) -> Writer:
        import obstore

        with _translated(key):
            file = obstore.open_writer(self._store, check_key(key), buffer_size=PART_BYTES, max_concurrency=UPLOADS)
        return _Upload(key, file)

    def put(self, key: str, data: Bytes) -> None:
        import obstore

        with _translated(key):
            obstore.put(self._store, check_key(key), bytes(data), use_multipart=False)

    def get(self, key: str) -> bytes:
        import obstore

        with _translated(key):
            return bytes(obstore.get(self._store, check_key(key)).bytes())

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        import obstore

        target = buffer.cast("B")
        if not len(target):
            self.size(key)
            return
        places = range(0, len(target), RANGE_BYTES)
        lengths = [min(RANGE_BYTES, len(target) - place) for place in places]
        starts = [offset + place for place in places]
        try:
            with _translated(key):
                parts = obstore.get_ranges(self._store, check_key(key), starts=starts, lengths=lengths, coalesce=0)
        except StoreAway:
            self._require_bytes(key, offset + len(target))  # a range behind the end is refused in the same words
            raise
        if [len(part) for part in parts] != lengths:
            self._require_bytes(key, offset + len(target))
            raise StoreAway(f"{key}: the store sent other bytes than were asked for")
        for place, part in zip(places, parts, strict=True):
            target[place : place + len(part)] = memoryview(part)

    def read_parts(self, key: str, parts: Sequence[Part], filled: Filled, alone: bool) -> None:
        for number, part in enumerate(parts):
            self.read_into(key, part.offset, part.buffer)
            filled(number)

    def _require_bytes(self, key: str, count: int) -> None:
        if self.size(key) < count:
            raise StoreError(f"{key} is truncated: it ends before byte {count}")

    def size(self, key: str) -> int:
        import obstore

        with _translated(key):
            return int(obstore.head(self._store, check_key(key))["size"])

    def list(self, prefix: str = "") -> Iterator[str]:
        import obstore

        with _translated(prefix):
            for page in obstore.list(self._store, prefix=prefix or None):
                yield from (str(item["path"]) for item in page)

    def folders(self) -> Iterator[str]:
        yield from (str(prefix).rstrip("/") for prefix in self._top()["common_prefixes"])

    def loose(self) -> Iterator[str]:
        yield from (str(item["path"]) for item in self._top()["objects"])

    def _top(self) -> Any:
        """One listing of the first components."""
        import obstore

        with _translated(""):
            return obstore.list_with_delimiter(self._store)

    def delete(self, key: str) -> None:
        import obstore

        try:
            with _translated(key):
                obstore.delete(self._store, check_key(key))
        except NotFound:
            return  # as asked

    def probe(self) -> None:
        key = f"probe-{secrets.token_hex(4)}"
        self.put(key, b"")
        self.delete(key)

    def delete_unfinished(self, prefix: str) -> None:
        """Nothing to do: an upload that was not completed is no object; the bucket's lifecycle removes its parts."""


class _Upload:
    """A multipart upload; small objects go in one request. Never completed unless the block ends normally."""

    def __init__(self, key: str, file: WritableFile) -> None:
        self._key, self._file = key, file

    def write(self, data: Bytes) -> None:
        with _translated(self._key):
            self._file.write(bytes(data))  # a copy: obstore keeps what it is given until the part is sent

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            with _translated(self._key):
                self._file.close()


@contextmanager
def _translated(key: str) -> Iterator[None]:
    """Turns obstore's errors into the store's own, by type. The text of an error names no credential."""
    from obstore import exceptions

    try:
        yield
    except (exceptions.NotFoundError, FileNotFoundError) as error:
        raise NotFound(f"{key}: there is no such object") from error
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise StoreDenied(f"{key}: the store refuses; check the credentials and the bucket's policy") from error
    except (exceptions.GenericError, exceptions.JoinError, OSError) as error:
        raise StoreAway(f"{key}: the store does not answer ({type(error).__name__})") from error
    except exceptions.BaseError as error:
        raise StoreError(f"{key}: {type(error).__name__}") from error
