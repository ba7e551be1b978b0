"""The checkpoints of a store: list, open, verify, delete, sweep. Torch-free; what the server needs.

A folder is a checkpoint when it holds a manifest and no tombstone. Deletion puts a tombstone first and takes the
manifest next, so that at every moment the folder is either whole or nothing, and a deletion that was killed can be
told from a save that was killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zero_engine.manifest import CheckpointError, Manifest, Shard, checksum_of, parse_folder
from zero_engine.shard import MANIFEST, read_blob, read_blocks, read_range
from zero_engine.store import NotFound, Store

TOMBSTONE = "deleted"


@dataclass(frozen=True)
class CheckpointName:
    """A published checkpoint, known by its folder; not yet verified."""

    folder: str
    step: int
    fence: int


@dataclass(frozen=True)
class Verification:
    """What a whole reading of a checkpoint found."""

    folder: str
    problems: tuple[str, ...]  # empty: every byte is as it was written
    bytes_read: int

    @property
    def ok(self) -> bool:
        return not self.problems


def list_checkpoints(store: Store) -> tuple[CheckpointName, ...]:
    """Published checkpoints, newest first: by attempt, then by step, never by a clock."""
    names = [CheckpointName(folder, *place) for folder, place in _folders(store) if is_published(store, folder)]
    return tuple(sorted(names, key=lambda name: (name.fence, name.step), reverse=True))


def is_published(store: Store, folder: str) -> bool:
    """Whether the folder holds a manifest and is not being deleted."""
    return _exists(store, f"{folder}/{MANIFEST}") and not _exists(store, f"{folder}/{TOMBSTONE}")


def read_manifest(store: Store, folder: str) -> Manifest:
    """The manifest of a folder. Raises CheckpointError when there is none or it is not this folder's."""
    if _exists(store, f"{folder}/{TOMBSTONE}"):
        raise CheckpointError(f"{folder} is being deleted")
    try:
        manifest = Manifest.decode(store.get(f"{folder}/{MANIFEST}"))
    except NotFound as error:
        raise CheckpointError(f"{folder} has no manifest: it was never finished") from error
    except CheckpointError as error:
        raise CheckpointError(f"the manifest of {folder}: {error}") from error
    if manifest.folder != folder:
        raise CheckpointError(f"the manifest of {folder} belongs to {manifest.folder}")
    manifest.check_complete()
    return manifest


def verify(store: Store, folder: str, progress: Callable[[int], None] | None = None) -> Verification:
    """Read every byte of a checkpoint and compare. Never raises for damage; raises StoreAway when the store is away.

    `progress` is told the bytes of each piece as it is read.
    """
    try:
        manifest = read_manifest(store, folder)
    except CheckpointError as error:
        return Verification(folder, (str(error),), 0)
    tell, problems, done = progress or (lambda count: None), list[str](), 0
    for shard in manifest.shards:
        try:
            for count in _verify_shard(store, folder, shard):
                done += count
                tell(count)
        except CheckpointError as error:
            problems.append(str(error))
    return Verification(folder, tuple(problems), done)


def delete(store: Store, folder: str) -> None:
    """Remove a checkpoint or the remains of one. May be killed at any point and called again."""
    if parse_folder(folder) is None:
        raise CheckpointError(f"{folder!r} is not the name of a checkpoint's folder")
    store.put(f"{folder}/{TOMBSTONE}", b"")
    store.delete(f"{folder}/{MANIFEST}")
    for key in list(store.list(f"{folder}/")):
        if not key.endswith(f"/{TOMBSTONE}"):
            store.delete(key)
    store.delete(f"{folder}/{TOMBSTONE}")
    store.delete_unfinished(f"{folder}/")


def unfinished(store: Store, before_fence: int) -> tuple[str, ...]:
    """Folders that are no checkpoints and never will be: deletions cut short, and saves of attempts that have ended.

    `before_fence`: attempts below this number have ended. Pass the number of the running one, or of the next.
    """
    dead = []
    for folder, (_, fence) in _folders(store):
        if _exists(store, f"{folder}/{TOMBSTONE}") or (fence < before_fence and not is_published(store, folder)):
            dead.append(folder)
    return tuple(sorted(dead))


def unreferenced(store: Store) -> tuple[str, ...]:
    """Keys that belong to no checkpoint's folder: reported, never removed by us."""
    return tuple(sorted(key for key in store.list() if parse_folder(key.split("/")[0]) is None))


def next_fence(store: Store) -> int:
    """A number above that of every folder, for runs that are not told theirs."""
    return 1 + max((fence for _, (_, fence) in _folders(store)), default=0)


def _folders(store: Store) -> list[tuple[str, tuple[int, int]]]:
    parsed = ((folder, parse_folder(folder)) for folder in store.folders())
    return [(folder, place) for folder, place in parsed if place is not None]


def _exists(store: Store, key: str) -> bool:
    try:
        store.size(key)
    except NotFound:
        return False
    return True


def _verify_shard(store: Store, folder: str, shard: Shard) -> Iterator[int]:
    """Bytes of each part as it is read. Raises CheckpointError at the first damage."""
    try:
        size = store.size(f"{folder}/{shard.file}")
    except NotFound as error:
        raise CheckpointError(f"{shard.file} of {folder} is missing") from error
    if size != shard.file_bytes:
        raise CheckpointError(f"{shard.file} of {folder} has {size} bytes; {shard.file_bytes} were written")
    header = bytearray(shard.header_bytes)
    read_range(store, folder, shard, 0, memoryview(header))
    if checksum_of(memoryview(header)) != shard.header_checksum:
        raise CheckpointError(f"{shard.file} of {folder}: the checksum of its header does not match")
    yield len(header)
    for segment in shard.segments:
        step = max(1, store.read_bytes // segment.block_bytes)
        buffer = memoryview(bytearray(step * segment.block_bytes))
        for first in range(0, segment.count, step):
            count = min(step, segment.count - first)
            read_blocks(store, folder, shard, segment, first, count, buffer[: count * segment.block_bytes])
            yield count * segment.block_bytes
    for blob in shard.blobs:
        yield len(read_blob(store, folder, shard, blob))
