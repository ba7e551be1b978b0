"""Weights of a checkpoint as one safetensors file with canonical names, streamed from the shards. Torch-free.

Every block is verified as it is read. Tied weights stand once, under their first name; the metadata entry "tied" maps
the other names to it. Buffers follow the parameters. Nothing is held in memory but one piece.
"""

from __future__ import annotations

import json
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from zero_engine.layout import Entry as Place
from zero_engine.layout import Layout
from zero_engine.manifest import Blob, CheckpointError, Manifest, Segment, Shard
from zero_engine.reshard import FROZEN, MASTER
from zero_engine.shard import BUFFER
from zero_engine.shard_reader import Wanted, read_blob, read_blocks
from zero_engine.store import Store
from zero_engine.tensorfile import ITEM_BYTES, Entry, encode_header

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}


class ExportError(CheckpointError):
    """What was asked cannot be exported; the sentence says what can."""

    code = "export_refused"


@dataclass(frozen=True)
class Export:
    """An export that is ready to be streamed: its length is known before the first byte."""

    store: Store
    manifest: Manifest
    dtype: str | None = None  # of floating-point tensors: a key of DTYPES; None: as stored (trainable ones in fp32)
    rename: Callable[[str], str] = str  # from the canonical name of a parameter to the one in the file

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ExportError(f"dtype is {self.dtype!r}; use one of {', '.join(DTYPES)}")

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The tensors of the file, in the order of named_parameters(), then the buffers."""
        stored = [Entry(self.rename(place.spec.name), self._stored(place), place.spec.shape) for place in self._places]
        stored += [Entry(name, blob.dtype, blob.shape) for name, _, blob in self._buffers]
        return tuple(Entry(entry.name, self._wanted(entry.dtype), entry.shape) for entry in stored)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the whole file."""
        return len(self._header) + sum(entry.num_bytes for entry in self.entries)

    def pieces(self) -> Iterator[bytes]:
        """The file from its first byte to its last. Raises CheckpointError when a block is damaged."""
        yield self._header
        values = {kind: _FlatReader(self.store, self.manifest, kind) for kind in (MASTER, FROZEN)}
        for place in self._places:
            reader = values[self._kind(place)]
            yield from self._cast(self._stored(place), reader.read(place.start, place.spec.numel))
        for _, shard, blob in self._buffers:
            data = read_blob(self.store, self.manifest.folder, shard, blob)
            yield from self._cast(blob.dtype, iter([memoryview(data)]))

    @property
    def _layout(self) -> Layout:
        return self.manifest.layout

    @cached_property
    def _places(self) -> tuple[Place, ...]:
        return self._layout.canonical_entries

    @cached_property
    def _buffers(self) -> list[tuple[str, Shard, Blob]]:
        found = ((shard, blob) for shard in self.manifest.shards for blob in shard.blobs)
        return [(blob.name.removeprefix(BUFFER), shard, blob) for shard, blob in found if blob.name.startswith(BUFFER)]

    @cached_property
    def _header(self) -> bytes:
        tied = {self.rename(a): self.rename(place.spec.name) for place in self._places for a in place.spec.aliases}
        metadata = {"format": "pt", "step": str(self.manifest.step), "digest": self.manifest.digest}
        return encode_header(self.entries, metadata | ({"tied": json.dumps(tied)} if tied else {}))[0]

    def _kind(self, place: Place) -> str:
        return MASTER if place.spec.trainable else FROZEN

    def _stored(self, place: Place) -> str:
        """Dtype of a parameter in the shards."""
        if place.spec.numel == 0:
            return "F32"
        kind, block = self._kind(place), place.start // self._layout.block
        for _, segment in self.manifest.segments:
            if segment.kind == kind and segment.first <= block < segment.first + segment.count:
                return segment.dtype
        raise CheckpointError(f"{place.spec.name} is in no shard of {self.manifest.folder}")

    def _wanted(self, stored: str) -> str:
        return DTYPES[self.dtype] if self.dtype and stored in DTYPES.values() else stored

    def _cast(self, stored: str, pieces: Iterator[memoryview]) -> Iterator[bytes]:
        wanted = self._wanted(stored)
        if wanted == stored:
            yield from map(bytes, pieces)
        elif (stored, wanted) in CASTS:
            yield from map(CASTS[stored, wanted], pieces)
        else:
            raise ExportError(f"{stored} is not exported as {wanted}; leave dtype out")


class _FlatReader:
    """Reads elements of one kind of state by their place in the flat space."""

    def __init__(self, store: Store, manifest: Manifest, kind: str) -> None:
        self._store, self._folder, self._block = store, manifest.folder, manifest.layout.block
        found = [(segment.first, shard, segment) for shard, segment in manifest.segments if segment.kind == kind]
        self._found = sorted(found, key=lambda item: item[0])
        self._firsts = [first for first, _, _ in self._found]

    def read(self, start: int, count: int) -> Iterator[memoryview]:
        """The bytes of `count` elements from flat element `start` on, in pieces that are valid until the next one."""
        stop = start + count
        while start < stop:
            shard, segment = self._segment_at(start // self._block)
            first = start // self._block
            most = max(1, self._store.read_bytes // segment.block_bytes)
            blocks = min(most, segment.first + segment.count - first, -(-stop // self._block) - first)
            data = memoryview(bytearray(blocks * segment.block_bytes))
            read_blocks(self._store, self._folder, shard, [Wanted(segment, first - segment.first, data)])
            item, base = ITEM_BYTES[segment.dtype], first * self._block
            end = min(stop, base + blocks * self._block)
            yield data[(start - base) * item : (end - base) * item]
            start = end

    def _segment_at(self, block: int) -> tuple[Shard, Segment]:
        place = bisect_right(self._firsts, block) - 1
        if place >= 0:
            _, shard, segment = self._found[place]
            if block < segment.first + segment.count:
                return shard, segment
        raise CheckpointError(f"block {block} is in no shard of {self._folder}")


def fp32_to_bf16(data: memoryview) -> bytes:
    """Round finite fp32 values to the nearest bf16, ties to even: integer arithmetic on all lanes of one long number.

    The sum cannot carry into the next lane: a finite value is at most 0xff7fffff and at most 0x8000 is added.
    """
    lanes = len(data) // 4
    bits = int.from_bytes(data, "little")
    ones = int.from_bytes(b"\x01\x00\x00\x00" * lanes, "little")
    rounded = (bits + ((bits >> 16) & ones) + ones * 0x7FFF).to_bytes(len(data), "little")
    result = bytearray(2 * lanes)
    result[0::2], result[1::2] = rounded[2::4], rounded[3::4]
    return bytes(result)


def fp32_to_fp16(data: memoryview) -> bytes:
    """Round fp32 values to the nearest fp16, ties to even. Raises ExportError for a value beyond its range."""
    values = array("f", bytes(data))
    try:
        return struct.pack(f"<{len(values)}e", *values)
    except OverflowError as error:
        raise ExportError("a weight is beyond the range of fp16 (65504); export as fp32 or bf16") from error


def bf16_to_fp32(data: memoryview) -> bytes:
    """Widen; exact."""
    result = bytearray(2 * len(data))
    result[2::4], result[3::4] = data[0::2], data[1::2]
    return bytes(result)


CASTS: dict[tuple[str, str], Callable[[memoryview], bytes]] = {
    ("F32", "BF16"): fp32_to_bf16,
    ("F32", "F16"): fp32_to_fp16,
    ("BF16", "F32"): bf16_to_fp32,
}
