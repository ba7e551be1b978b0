"""The checkpoints of a store: list, open, verify, delete, sweep. Torch-free; what the server needs.

A folder is a checkpoint when it holds a manifest and no tombstone. Deletion puts a tombstone first and takes the
manifest next, so that at every moment the folder is either whole or nothing, and a deletion that was killed can be
told from a save that was killed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zero_engine.fetcher import Part
from zero_engine.manifest import CheckpointError, Manifest, NotPublished, Segment, Shard, checksum_of, parse_folder
from zero_engine.shard import MANIFEST
from zero_engine.shard_reader import DamagedBlob, damaged_blocks, read_blob, read_parts, read_range
from zero_engine.store import NotFound, Store

TOMBSTONE = "deleted"


@dataclass(frozen=True)
class CheckpointName:
    """A published checkpoint, known by its folder; not yet verified."""

    folder: str
    step: int
    fence: int


@dataclass(frozen=True)
class Damage:
    """One thing that is not as it was written."""

    problem: str  # a sentence that names the file
    rank: int | None = None  # whose shard; None: the manifest
    kind: str = ""  # of the damaged blocks, or the damaged buffer's name
    blocks: tuple[int, ...] = ()  # their numbers in the flat space of the layout


@dataclass(frozen=True)
class Verification:
    """What a whole reading of a checkpoint found."""

    folder: str
    damage: tuple[Damage, ...]  # empty: every byte is as it was written
    bytes_read: int

    @property
    def ok(self) -> bool:
        return not self.damage

    @property
    def problems(self) -> tuple[str, ...]:
        """A sentence for each damage."""
        return tuple(item.problem for item in self.damage)

    @property
    def bad_ranks(self) -> tuple[int, ...]:
        """Ranks whose shard is damaged or missing."""
        return tuple(sorted({item.rank for item in self.damage if item.rank is not None}))


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
        raise NotPublished(f"{folder} has no manifest: it was never finished, or was deleted") from error
    except CheckpointError as error:
        raise type(error)(f"the manifest of {folder}: {error}") from error
    if manifest.folder != folder:
        raise CheckpointError(f"the manifest of {folder} belongs to {manifest.folder}")
    manifest.check_complete()
    return manifest


def verify(store: Store, folder: str, progress: Callable[[int], None] | None = None) -> Verification:
    """Read every byte of a checkpoint and compare. Never raises for damage; raises StoreAway when the store is away.

    A damaged block does not end the reading: the result lists every rank and block that is bad. `progress` is told the
    bytes of each piece as it is read.
    """
    try:
        manifest = read_manifest(store, folder)
    except CheckpointError as error:
        return Verification(folder, (Damage(str(error)),), 0)
    tell, found, done = progress or (lambda count: None), list[Damage](), 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        tell(size)

    for shard in manifest.shards:
        found += verify_shard(store, folder, shard, count)
    return Verification(folder, tuple(found), done)


def verify_shard(store: Store, folder: str, shard: Shard, progress: Callable[[int], None]) -> list[Damage]:
    """Read every byte of one rank's file and compare, as `verify` does for all; what `progress` raises ends it."""
    found = list[Damage]()
    try:
        _verify_shard(store, folder, shard, progress, found)
    except CheckpointError as error:  # it cannot be read on
        found.append(Damage(str(error), shard.rank))
    return found


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


def _verify_shard(
    store: Store, folder: str, shard: Shard, progress: Callable[[int], None], found: list[Damage]
) -> None:
    """Damage is added to `found`. Raises CheckpointError when the file cannot be read."""
    where = f"{shard.file} of {folder}"
    try:
        size = store.size(f"{folder}/{shard.file}")
    except NotFound as error:
        raise CheckpointError(f"{where} is missing") from error
    if size != shard.file_bytes:
        raise CheckpointError(f"{where} has {size} bytes; {shard.file_bytes} were written")
    header = bytearray(shard.header_bytes)
    read_range(store, folder, shard, 0, memoryview(header))
    if checksum_of(memoryview(header)) != shard.header_checksum:
        found.append(Damage(f"{where}: the checksum of its header does not match", shard.rank))
    progress(len(header))
    for segment in shard.segments:
        _verify_segment(store, folder, shard, segment, progress, found)
    for blob in shard.blobs:
        try:
            progress(len(read_blob(store, folder, shard, blob)))
        except DamagedBlob as error:
            found.append(Damage(str(error), shard.rank, blob.name))


def _verify_segment(
    store: Store, folder: str, shard: Shard, segment: Segment, progress: Callable[[int], None], found: list[Damage]
) -> None:
    """One way through a segment, past the page cache where its bytes are not in it: what others read stays there."""
    step, size = max(1, store.read_bytes // segment.block_bytes), segment.block_bytes
    buffer = memoryview(bytearray(min(step, segment.count) * size))
    firsts, bad = range(0, segment.count, step), list[int]()
    parts = [Part(segment.offset + first * size, buffer[: (segment.count - first) * size]) for first in firsts]

    def compare(number: int) -> None:
        bad.extend(damaged_blocks(parts[number].buffer, segment, firsts[number]))
        progress(len(parts[number].buffer))

    read_parts(store, folder, shard, parts, compare, alone=True)
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        problem = f"{shard.file} of {folder}: the checksum of {segment.kind} block {bad[0]}{more} does not match"
        found.append(Damage(problem, shard.rank, segment.kind, tuple(bad)))
