"""The manifest: the one file that makes a folder of shards a checkpoint (docs/checkpoint-format.md). Torch-free.

It is written last and says everything that reading needs: the layout, where every block of every kind of state lies, a
checksum per block, and the scalars of the run. It carries a checksum of itself. Frozen values in, frozen values out;
which shards exist in a store is the business of `catalog.py`, the bytes of a shard that of `shard.py`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from zero_engine.errors import EngineError
from zero_engine.layout import Layout
from zero_engine.reshard import Run, moves, needed
from zero_engine.tensorfile import ITEM_BYTES

FORMAT = "shardyard-checkpoint"
VERSION = 1
CHECKSUM_BYTES = 8  # xxh3, 64 bits, in its canonical (big-endian) form

Json = dict[str, Any]


class CheckpointError(EngineError):
    """A checkpoint, or a folder that looks like one, cannot be used. The sentence says which part and why."""

    code = "checkpoint_unusable"


class NotPublished(CheckpointError):
    """A folder has no manifest: its save never ended, or nothing of the store is in sight."""


class Unfit(CheckpointError):
    """A checkpoint that may be whole, and that this model or this build cannot take."""


@dataclass(frozen=True)
class Segment:
    """Contiguous blocks of one kind of state in a shard file."""

    kind: str  # "master", "frozen", "exp_avg", ...
    dtype: str  # as safetensors names it
    first: int  # block
    count: int  # blocks
    offset: int  # bytes from the start of the file
    block_bytes: int
    checksums: bytes = field(repr=False)  # CHECKSUM_BYTES per block

    @property
    def run(self) -> Run:
        return Run(self.kind, self.first, self.count)


@dataclass(frozen=True)
class Blob:
    """A named tensor stored whole: a module buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    checksum: str  # 16 hex digits

    @property
    def num_bytes(self) -> int:
        count = ITEM_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Shard:
    """One rank's file."""

    rank: int
    file: str  # name inside the folder
    file_bytes: int
    header_bytes: int
    header_checksum: str  # 16 hex digits
    segments: tuple[Segment, ...]
    blobs: tuple[Blob, ...] = ()

    @property
    def checksum(self) -> str:
        """16 hex digits over the header's, the segments' and the blobs' checksums."""
        blobs = (blob.checksum.encode() for blob in self.blobs)
        return checksum_of(b"".join([self.header_checksum.encode(), *(s.checksums for s in self.segments), *blobs]))

    def to_json(self) -> Json:
        return {
            **{name: getattr(self, name) for name in ("rank", "file", "file_bytes", "header_bytes", "header_checksum")},
            "segments": [_segment_json(segment) for segment in self.segments],
            "blobs": [asdict(blob) for blob in self.blobs],
        }

    @staticmethod
    def from_json(data: Json) -> Shard:
        segments = tuple(_segment(item) for item in data["segments"])
        blobs = tuple(Blob(**{**item, "shape": tuple(item["shape"])}) for item in data["blobs"])
        return Shard(**{**data, "segments": segments, "blobs": blobs})


@dataclass(frozen=True)
class Environment:
    """What the promise of equal bits depends on beside the numbers."""

    device: str  # cpu, or the name of the CUDA device
    torch: str
    threads: int  # per rank


@dataclass(frozen=True)
class Progress:
    """Where the run around the engine stands; given by the caller of save, handed back by load."""

    data_cursor: int = 0  # samples consumed
    data_hash: str = ""  # content hash of tokens and tokenizer
    schedule: Json = field(default_factory=dict)
    tokenizer: str = ""  # reference: a content hash
    extra: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Arithmetic:
    """What fixes the bits: changing one of these on resume is another run."""

    seed: int
    micro_batches: int  # V
    chunk: int  # C
    precision: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint, complete. Only made when every shard is durable."""

    step: int
    fence: int  # attempt number
    ranks: int
    stage: int
    digest: str  # 16 hex digits, of the whole state
    arithmetic: Arithmetic
    environment: Environment
    layout: Layout = field(repr=False)
    optimizer: Json  # {"kind": "AdamW", "moments": ["exp_avg", "exp_avg_sq"]}
    scalars: Json  # step counts, loss scale: the engine's own small state
    progress: Progress
    shards: tuple[Shard, ...] = field(repr=False)
    created: str = ""  # wall clock, for people only; nothing is ordered by it

    @property
    def folder(self) -> str:
        return folder_name(self.step, self.fence)

    @property
    def total_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(shard.file_bytes for shard in self.shards)

    @property
    def segments(self) -> tuple[tuple[Shard, Segment], ...]:
        """Every segment with its shard, in file order."""
        return tuple((shard, segment) for shard in self.shards for segment in shard.segments)

    def check_complete(self) -> None:
        """Raises CheckpointError unless the shards hold every block that the layout needs exactly once."""
        have = [segment.run for _, segment in self.segments]
        try:
            moves(have, needed(self.layout, self.moments))
        except ValueError as error:
            raise CheckpointError(f"{self.folder} is not complete: {error}") from error

    @property
    def moments(self) -> tuple[str, ...]:
        """Kinds of state that the optimizer keeps per trainable element, beside the master weights."""
        return tuple(self.optimizer["moments"])

    def encode(self) -> bytes:
        """The bytes of the manifest file."""
        body = {
            **{name: getattr(self, name) for name in _PLAIN},
            "arithmetic": asdict(self.arithmetic),
            "environment": asdict(self.environment),
            "progress": asdict(self.progress),
            "layout": self.layout.to_json(),
            "shards": [shard.to_json() for shard in self.shards],
        }
        return encode_sealed({"format": FORMAT, "version": VERSION}, body)

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """The manifest of a file. Raises CheckpointError when it is damaged, foreign or from a newer version."""
        head, body = decode_sealed(data)
        if head.get("format") != FORMAT:
            raise CheckpointError("the manifest is not one of ours")
        reader = READERS.get(head.get("version"))
        if reader is None:
            raise Unfit(f"the manifest has version {head.get('version')}; this build reads {sorted(READERS)}")
        try:
            return reader(body)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the manifest lacks or contradicts itself in {error}") from error


_PLAIN = ("step", "fence", "ranks", "stage", "digest", "optimizer", "scalars", "created")


def folder_name(step: int, fence: int) -> str:
    """Name of the folder of a step and attempt; sorts by step, and two attempts never share one."""
    return f"step-{step:010d}-attempt-{fence:06d}"


def parse_folder(name: str) -> tuple[int, int] | None:
    """(step, fence) of a checkpoint's folder name, None for any other name."""
    words = name.split("-")
    if len(words) != 4 or not (words[1].isdecimal() and words[3].isdecimal() and name.isascii()):
        return None
    step, fence = int(words[1]), int(words[3])
    return (step, fence) if folder_name(step, fence) == name else None


def encode_sealed(head: Json, body: Json) -> bytes:
    """A JSON object with its body and the checksum of the body's text, so that damage is seen.

    Raises ValueError or TypeError when the body is not JSON (a NaN, a set).
    """
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    sealed = json.dumps({**head, "checksum": checksum_of(text.encode())}, separators=(",", ":"))
    return f"{sealed[:-1]}{_BODY}{text}}}".encode()


def decode_sealed(data: bytes) -> tuple[Mapping[str, Any], Json]:
    """Head and body. Raises CheckpointError when the bytes are not what was written."""
    start = data.find(_BODY.encode())
    try:
        head = json.loads(data[:start] + b"}")
        if head["checksum"] != checksum_of(data[start + len(_BODY) : -1]) or data[-1:] != b"}":
            raise CheckpointError("its content does not match its own checksum: it is truncated or damaged")
        return head, json.loads(data[start + len(_BODY) : -1])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError("it is truncated or damaged") from error


_BODY = ',"body":'


def checksum_of(data: bytes | memoryview) -> str:
    """xxh3 (64 bits) as 16 hex digits."""
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def _segment_json(segment: Segment) -> Json:
    return {**asdict(segment), "checksums": base64.b64encode(segment.checksums).decode()}


def _segment(data: Json) -> Segment:
    segment = Segment(**{**data, "checksums": base64.b64decode(data["checksums"], validate=True)})
    if len(segment.checksums) != segment.count * CHECKSUM_BYTES:
        raise ValueError(f"the checksums of {segment.kind} block {segment.first}")
    return segment


def _read_version_1(body: Json) -> Manifest:
    return Manifest(
        **{
            **body,
            "arithmetic": Arithmetic(**body["arithmetic"]),
            "environment": Environment(**body["environment"]),
            "progress": Progress(**body["progress"]),
            "layout": Layout.from_json(body["layout"]),
            "shards": tuple(Shard.from_json(item) for item in body["shards"]),
        }
    )


READERS: dict[Any, Callable[[Json], Manifest]] = {1: _read_version_1}
"""How each version is read; the previous version stays here when a new one comes."""
