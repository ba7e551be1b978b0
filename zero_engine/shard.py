"""One rank's file of a checkpoint, written from memory with a checksum per block (read: `shard_reader.py`). Torch-free.

The order of a save is the whole safety argument: every rank puts its shard, then its record; rank 0 waits for all
records, then publishes the manifest. Each put is atomic and durable, so whatever is killed, a folder with a manifest is
complete and a folder without one is nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import xxhash

from zero_engine.manifest import (
    Blob,
    CheckpointError,
    Json,
    Manifest,
    Segment,
    Shard,
    checksum_of,
    decode_sealed,
    encode_sealed,
)
from zero_engine.store import NotFound, Store, StoreError
from zero_engine.tensorfile import Entry, encode_header

MANIFEST = "manifest.json"
BUFFER = "buffer/"  # begins the name of a module buffer in a shard
PIECE_BYTES = 2**20  # hashed, then written, while it is in the processor's cache
POLL_SECONDS = 0.02  # between looks for records that are not there yet
RECORD_FORMAT, RECORD_VERSION = "shardyard-shard", 1


@dataclass(frozen=True)
class Source:
    """Blocks in memory: `data` holds whole blocks of one kind, from block `first` on."""

    kind: str
    dtype: str
    first: int
    block_bytes: int
    data: memoryview  # bytes


@dataclass(frozen=True)
class NamedSource:
    """A tensor in memory that is stored whole."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview  # bytes


@dataclass(frozen=True)
class Record:
    """What a rank says when its shard is durable."""

    shard: Shard
    digest_part: int  # modulo 2^64; the parts of all ranks sum to the digest
    ticket: str  # names the save: rank 0 takes no record of another one


@dataclass(frozen=True)
class Refusal:
    """What a rank says instead, so that rank 0 need not wait for what will never come."""

    problem: str
    ticket: str


WORDLESS = Refusal("No space left even to say why", "")


def shard_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def record_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def write_shard(
    store: Store,
    folder: str,
    rank: int,
    sources: Sequence[Source],
    named: Sequence[NamedSource] = (),
    moved: Callable[[], None] = lambda: None,
    approve: Callable[[], object] = lambda: None,
) -> Shard:
    """Write one rank's file and return its description. Raises StoreError; then nothing was published.

    `moved` is called after each piece, `approve` when all is written: what it raises leaves no file.
    """
    entries = [Entry(_name(source), source.dtype, (_elements(source),)) for source in sources]
    entries += [Entry(item.name, item.dtype, item.shape) for item in named]
    header, placed = encode_header(entries, {"format": RECORD_FORMAT, "rank": str(rank)})
    places = [entry.start for entry in placed]
    with store.create(f"{folder}/{shard_file(rank)}") as writer:
        writer.write(header)
        segments = []
        for source, place in zip(sources, places, strict=False):
            checksums = bytearray()
            for piece in pieces(source.data, source.block_bytes):
                checksums += block_checksums(piece, source.block_bytes)
                writer.write(piece)
                moved()
            count = len(source.data) // source.block_bytes
            segments.append(
                Segment(source.kind, source.dtype, source.first, count, place, source.block_bytes, bytes(checksums))
            )
        blobs = []
        for item, place in zip(named, places[len(sources) :], strict=True):
            blobs.append(Blob(item.name, item.dtype, item.shape, place, checksum_of(item.data)))
            writer.write(item.data)
        approve()
    end = placed[-1].stop if placed else len(header)
    return Shard(rank, shard_file(rank), end, len(header), checksum_of(header), tuple(segments), tuple(blobs))


def pieces(data: memoryview, block_bytes: int, piece_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
    """In whole blocks, about so many bytes each."""
    size = max(block_bytes, piece_bytes // block_bytes * block_bytes)
    for start in range(0, len(data), size):
        yield data[start : start + size]


def block_checksums(data: memoryview, block_bytes: int) -> bytes:
    """CHECKSUM_BYTES per block; `data` holds whole blocks."""
    digest = xxhash.xxh3_64_digest
    return b"".join([digest(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes)])


def put_record(store: Store, folder: str, record: Record) -> None:
    """Say that this rank's shard is durable."""
    body = {"shard": record.shard.to_json(), "digest_part": f"{record.digest_part:016x}", "ticket": record.ticket}
    _put_sealed(store, f"{folder}/{record_file(record.shard.rank)}", body)


def put_refusal(store: Store, folder: str, rank: int, refusal: Refusal) -> None:
    """Say that this rank's shard will not come. A full disk often takes an empty file: that says the least."""
    key = f"{folder}/{record_file(rank)}"
    try:
        _put_sealed(store, key, {"problem": refusal.problem, "ticket": refusal.ticket})
    except StoreError:
        store.put(key, b"")


def get_record(store: Store, folder: str, rank: int) -> Record | Refusal | None:
    """What a rank said, None while it said nothing."""
    try:
        data = store.get(f"{folder}/{record_file(rank)}")
    except NotFound:
        return None
    if not data:
        return WORDLESS
    _, body = decode_sealed(data)
    if "problem" in body:
        return Refusal(body["problem"], body["ticket"])
    return Record(Shard.from_json(body["shard"]), int(body["digest_part"], 16), body["ticket"])


def wait_for_records(
    store: Store,
    folder: str,
    ranks: int,
    ticket: str,
    patience_seconds: float,
    give_up: Callable[[], bool] = lambda: False,
) -> tuple[Record, ...]:
    """The records of all ranks, in rank order. Raises CheckpointError for a refusal, and for ranks that stay silent.

    The patience starts anew whenever a record arrives: a slow store is waited for, a dead rank is not.
    """
    found: dict[int, Record] = {}
    deadline = time.monotonic() + patience_seconds
    while len(found) < ranks:
        arrived = _new_records(store, folder, [rank for rank in range(ranks) if rank not in found], ticket)
        if arrived:
            found |= arrived
            deadline = time.monotonic() + patience_seconds
        elif time.monotonic() > deadline:
            silent = sorted(set(range(ranks)) - set(found))
            raise CheckpointError(f"{folder}: no shard from ranks {silent} within {patience_seconds:g} s")
        elif give_up():
            raise CheckpointError(f"{folder}: given up, the rank that saves is gone")
        else:
            time.sleep(POLL_SECONDS)
    return tuple(found[rank] for rank in range(ranks))


def publish(store: Store, draft: Manifest, records: Sequence[Record]) -> Manifest:
    """Complete the draft with the shards of all ranks and make it a checkpoint: the last write of a save.

    Raises CheckpointError when the shards together do not hold every block exactly once.
    """
    digest = sum(record.digest_part for record in records) % 2**64
    manifest = replace(draft, digest=f"{digest:016x}", shards=tuple(record.shard for record in records))
    manifest.check_complete()
    store.put(f"{manifest.folder}/{MANIFEST}", manifest.encode())
    return manifest


def _put_sealed(store: Store, key: str, body: Json) -> None:
    store.put(key, encode_sealed({"format": RECORD_FORMAT, "version": RECORD_VERSION}, body))


def _new_records(store: Store, folder: str, missing: Sequence[int], ticket: str) -> Mapping[int, Record]:
    arrived: dict[int, Record] = {}
    for rank in missing:
        said = get_record(store, folder, rank)
        if said is None or (said.ticket != ticket and said is not WORDLESS):
            continue
        if isinstance(said, Refusal):
            raise CheckpointError(f"{folder}: rank {rank} could not save its shard: {said.problem}")
        arrived[rank] = said
    return arrived


def _name(source: Source) -> str:
    return f"{source.kind}/{source.first}-{source.first + len(source.data) // source.block_bytes}"


def _elements(source: Source) -> int:
    return len(source.data) // Entry("", source.dtype, (1,)).num_bytes
