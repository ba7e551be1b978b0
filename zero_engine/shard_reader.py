"""Blocks and named tensors out of a shard's file (`shard.py`), each verified. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zero_engine.fetcher import Part
from zero_engine.manifest import CHECKSUM_BYTES, Blob, CheckpointError, Segment, Shard, checksum_of
from zero_engine.shard import block_checksums, pieces
from zero_engine.store import Store, StoreAway, StoreError


class DamagedBlob(CheckpointError):
    """A named tensor is not as it was written."""


@dataclass(frozen=True)
class Wanted:
    """Whole blocks of a segment, from its block number `first` on, and where they go."""

    segment: Segment
    first: int
    target: memoryview  # bytes


def read_blocks(
    store: Store,
    folder: str,
    shard: Shard,
    wanted: Sequence[Wanted],
    filled: Callable[[int], None] = lambda number: None,
    alone: bool = False,
) -> None:
    """Fill every target in one way through the shard's file, every block verified.

    `filled` is told the number of each in `wanted` before the next is touched, which may have the same memory. `alone`:
    no other rank reads these blocks. Raises CheckpointError that names the file and the first damaged block.
    """
    parts, places = list[Part](), list[tuple[int, int, bool]]()
    for number, each in enumerate(wanted):
        done, size = 0, each.segment.block_bytes
        for piece in pieces(each.target, size, store.read_bytes):
            parts.append(Part(each.segment.offset + each.first * size + done, piece))
            done += len(piece)
            places.append((number, each.first + (done - len(piece)) // size, done == len(each.target)))

    def verify(part: int) -> None:
        number, first, last = places[part]
        segment = wanted[number].segment
        bad = damaged_blocks(parts[part].buffer, segment, first)
        if bad:
            raise CheckpointError(
                f"{shard.file} of {folder}: the checksum of {segment.kind} block {bad[0]} does not match"
            )
        if last:
            filled(number)

    read_parts(store, folder, shard, parts, verify, alone)


def damaged_blocks(data: memoryview, segment: Segment, first: int) -> list[int]:
    """Numbers of the blocks whose checksum differs; `data` holds whole blocks from block `first` of the segment on.

    All checksums are compared at once; blocks are looked at one by one only when they differ.
    """
    expected = segment.checksums[first * CHECKSUM_BYTES :][: len(data) // segment.block_bytes * CHECKSUM_BYTES]
    actual = block_checksums(data, segment.block_bytes)
    if actual == expected:
        return []
    places = range(0, len(actual), CHECKSUM_BYTES)
    differ = [place for place in places if actual[place:][:CHECKSUM_BYTES] != expected[place:][:CHECKSUM_BYTES]]
    return [segment.first + first + place // CHECKSUM_BYTES for place in differ]


def read_range(store: Store, folder: str, shard: Shard, offset: int, target: memoryview) -> None:
    """Fill `target` from a shard's file. Raises as `read_parts` does."""
    if len(target):
        read_parts(store, folder, shard, [Part(offset, target)])


def read_parts(
    store: Store,
    folder: str,
    shard: Shard,
    parts: Sequence[Part],
    filled: Callable[[int], None] = lambda number: None,
    alone: bool = False,
) -> None:
    """Parts of a shard's file. A store that is away stays a StoreAway; what else it raises is a CheckpointError."""
    try:
        store.read_parts(f"{folder}/{shard.file}", parts, filled, alone)
    except StoreAway:
        raise
    except StoreError as error:
        raise CheckpointError(f"{shard.file} of {folder} cannot be read: {error}") from error


def read_blob(store: Store, folder: str, shard: Shard, blob: Blob) -> bytearray:
    """The bytes of a named tensor, verified."""
    data = bytearray(blob.num_bytes)
    read_range(store, folder, shard, blob.offset, memoryview(data))
    if checksum_of(memoryview(data)) != blob.checksum:
        raise DamagedBlob(f"{shard.file} of {folder}: the checksum of {blob.name} does not match")
    return data
