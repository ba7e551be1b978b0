"""The safetensors container by hand, so that it can be streamed and read in pieces without torch or numpy.

A file is: 8 bytes little-endian header length, the header (JSON, padded with spaces), then the tensors without gaps
(https://github.com/huggingface/safetensors, "Format"). Checkpoint shards and exports are such files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of an element by the format's name of its dtype."""

ALIGNMENT = 64  # the first tensor starts at a multiple of this
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its bytes are [start, stop) counted from the start of the file."""

    name: str
    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]
    start: int = 0
    stop: int = 0

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * ITEM_BYTES[self.dtype]


class NotATensorFile(ValueError):
    """The bytes are not a safetensors header."""


def encode_header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> tuple[bytes, tuple[Entry, ...]]:
    """The first bytes of a file whose tensors follow in this order, and the entries with their places filled in."""
    body: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for entry in entries:
        place = [offset, offset + entry.num_bytes]
        body[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": place}
        offset += entry.num_bytes
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    placed, start = [], 8 + len(text)
    for entry in entries:
        placed.append(Entry(entry.name, entry.dtype, entry.shape, start, start + entry.num_bytes))
        start += entry.num_bytes
    return len(text).to_bytes(8, "little") + text, tuple(placed)


def header_bytes(first_eight: bytes) -> int:
    """Bytes before the first tensor, from the first 8 bytes of a file."""
    length = int.from_bytes(first_eight, "little")
    if len(first_eight) != 8 or length > MAX_HEADER_BYTES:
        raise NotATensorFile(f"a header of {length} bytes is not plausible")
    return 8 + length


def decode_header(data: bytes) -> tuple[tuple[Entry, ...], dict[str, str]]:
    """The entries in file order and the metadata, from the first `header_bytes` bytes of a file."""
    base = header_bytes(data[:8])
    try:
        body = json.loads(data[8:base])
        metadata = body.pop("__metadata__", {})
        entries = [_entry(name, item, base) for name, item in body.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotATensorFile(f"the header cannot be read: {error}") from error
    return tuple(sorted(entries, key=lambda entry: entry.start)), metadata


def _entry(name: str, item: dict[str, Any], base: int) -> Entry:
    start, stop = item["data_offsets"]
    return Entry(name, item["dtype"], tuple(item["shape"]), base + start, base + stop)
