"""A checkpoint read by docs/checkpoint-format.md alone: the standard library and xxh3, nothing of ours."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

ITEMS = {"F64": "d", "F32": "f", "I64": "q", "I32": "i", "I16": "h", "I8": "b", "U8": "B", "BOOL": "?"}

Json = dict[str, Any]
Values = tuple[Any, ...]


@dataclass(frozen=True)
class Found:
    """What the document says is there."""

    body: Json  # of the manifest
    parameters: dict[str, dict[str, Values]]  # by kind and name
    buffers: dict[str, Values]
    padding: frozenset[Any]  # every value that belongs to no parameter


def read(folder: Path) -> Found:
    """A whole checkpoint. Asserts on whatever is not as the document has it."""
    body = _sealed(folder / "manifest.json", "shardyard-checkpoint")
    assert folder.name == f"step-{body['step']:010d}-attempt-{body['fence']:06d}" and not (folder / "deleted").exists()
    digest, buffers, blocks = 0, dict[str, Values](), dict[tuple[str, int], Values]()
    for rank, shard in enumerate(body["shards"]):
        record = _sealed(folder / f"rank-{rank:05d}.json", "shardyard-shard")
        assert record["shard"] == shard and record["ticket"] and shard["rank"] == rank
        assert shard["file"] == f"rank-{rank:05d}.safetensors"
        digest += int(record["digest_part"], 16)
        data = (folder / shard["file"]).read_bytes()
        tensors = _tensors(data, shard, rank)
        for segment in shard["segments"]:
            for number, values in _blocks(data, segment, tensors):
                assert (segment["kind"], number) not in blocks, "a block stands once"
                blocks[segment["kind"], number] = values
        for blob in shard["blobs"]:
            dtype, shape, start, stop = tensors.pop(blob["name"])
            assert (dtype, shape, start) == (blob["dtype"], blob["shape"], blob["offset"])
            assert blob["checksum"] == _hex(data[start:stop])
            buffers[blob["name"].removeprefix("buffer/")] = _values(dtype, data[start:stop])
        assert not tensors, "the header names what the manifest names"
    assert f"{digest % 2**64:016x}" == body["digest"]
    parameters, padding = _parameters(body, blocks)
    return Found(body, parameters, buffers, padding)


def _sealed(path: Path, kind: str) -> Json:
    """The body of a manifest or record, whose text is as its checksum says."""
    data = path.read_bytes()
    whole, start = json.loads(data), data.index(b'"body":') + len(b'"body":')
    assert (whole["format"], whole["version"], whole["checksum"]) == (kind, 1, _hex(data[start:-1]))
    body: Json = whole["body"]
    return body


def _tensors(data: bytes, shard: Json, rank: int) -> dict[str, tuple[str, list[int], int, int]]:
    """(dtype, shape, start, stop) in the file, by name; together they and the header are all of the file."""
    base = 8 + struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:base])
    assert header.pop("__metadata__") == {"format": "shardyard-shard", "rank": str(rank)}
    assert (base, _hex(data[:base]), len(data)) == tuple(
        shard[name] for name in ("header_bytes", "header_checksum", "file_bytes")
    )
    found = {
        name: (item["dtype"], item["shape"], *(base + at for at in item["data_offsets"]))
        for name, item in header.items()
    }
    at = base
    for _, _, start, stop in sorted(found.values(), key=lambda each: each[2:]):
        assert start == at, "no gaps"
        at = stop
    assert at == len(data)
    return found


def _blocks(data: bytes, segment: Json, tensors: dict[str, Any]) -> Iterator[tuple[int, Values]]:
    """Number and values of each block of a segment, whose checksums match; its tensor is taken from `tensors`."""
    first, count, size = segment["first"], segment["count"], segment["block_bytes"]
    dtype, shape, start, stop = tensors.pop(f"{segment['kind']}/{first}-{first + count}")
    assert (dtype, start, stop) == (segment["dtype"], segment["offset"], segment["offset"] + count * size)
    checksums = base64.b64decode(segment["checksums"])
    assert len(checksums) == 8 * count and len(shape) == 1
    for number in range(count):
        block = data[start + number * size :][:size]
        assert xxhash.xxh3_64_intdigest(block) == int.from_bytes(checksums[8 * number :][:8], "big")
        yield first + number, _values(dtype, block)


def _parameters(
    body: Json, blocks: dict[tuple[str, int], Values]
) -> tuple[dict[str, dict[str, Values]], frozenset[Any]]:
    """Each kind's values by parameter, and the padding. Every block of every kind is there, and no other."""
    specs, block = body["layout"]["parameters"], body["layout"]["block"]
    count = sum(math.prod(spec["shape"]) for spec in specs)
    assert block == (min(131072, max(256, 2 ** max(0, round(math.log2(count / 32768))))) if count else 256)
    kinds = {True: ["master", *body["optimizer"]["moments"]], False: ["frozen"]}
    found = {kind: dict[str, Values]() for kind in (*kinds[True], *kinds[False])}
    rest, at = dict(blocks), 0
    padding = set[Any]()
    for unit in dict.fromkeys(["", *(spec["unit"] for spec in specs)]):
        runs: dict[tuple[Any, ...], list[Json]] = {}
        for spec in specs:
            if spec["unit"] == unit:
                runs.setdefault((spec["group"], spec["dtype"], spec["trainable"]), []).append(spec)
        for key in sorted(runs):
            places = list[tuple[str, int, int]]()
            for spec in runs[key]:
                places.append((spec["name"], at, at + math.prod(spec["shape"])))
                at = -(-places[-1][2] // 32) * 32
            first, stop = places[0][1] // block, max(places[0][1] // block + 1, -(-at // block))
            at = stop * block
            for kind in kinds[key[2]]:
                values = [value for number in range(first, stop) for value in rest.pop((kind, number))]
                end = first * block
                for name, start, end_of in places:
                    padding |= set(values[end - first * block : start - first * block])
                    found[kind][name] = tuple(values[start - first * block : end_of - first * block])
                    end = end_of
                padding |= set(values[end - first * block :])
    assert not rest, "no block is beyond the layout"
    return found, frozenset(padding)


def _values(dtype: str, data: bytes) -> Values:
    """Little-endian numbers."""
    if dtype == "BF16":  # the upper half of an F32
        data, dtype = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2)), "F32"
    item = ITEMS[dtype]
    return struct.unpack(f"<{len(data) // struct.calcsize(item)}{item}", data)


def _hex(data: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(data):016x}"
