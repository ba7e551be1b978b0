"""From the shards of a checkpoint into the tensors of one rank, whatever ranks wrote it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_engine.manifest import Manifest, Segment, Shard, Unfit
from zero_engine.reshard import moves
from zero_engine.shard import BUFFER
from zero_engine.shard_reader import Wanted, read_blob, read_blocks
from zero_engine.state import DTYPES, Subject, bytes_of
from zero_engine.store import Store

BOUNCE_BYTES = 16 * 2**20  # read to the host at a time for a device that the store cannot read into


def read_state(store: Store, manifest: Manifest, subject: Subject) -> None:
    """Fill this rank's tensors from the shards, every block verified. Raises CheckpointError."""
    have, need = list(manifest.segments), list(subject.held())
    own = {run for run, _ in subject.owned()}
    reads: dict[tuple[int, bool], list[_Read]] = defaultdict(list)  # by shard, and whether no other rank reads them
    for move in moves([segment.run for _, segment in have], [run for run, _ in need]):
        shard, segment = have[move.source]
        run, tensor = need[move.target]
        if DTYPES[tensor.dtype] != segment.dtype:
            raise Unfit(f"{run.kind} block {run.first} is {segment.dtype}; this engine keeps {tensor.dtype}")
        block = manifest.layout.block
        target = tensor[move.target_block * block : (move.target_block + move.count) * block]
        reads[shard.rank, run in own].append(_Read(segment, move.source_block, target))
    shards = {shard.rank: shard for shard in manifest.shards}
    for (rank, alone), wanted in reads.items():
        _read_tensors(store, manifest, shards[rank], sorted(wanted, key=lambda read: read.offset), alone)
    _read_buffers(store, manifest, subject)


@dataclass(frozen=True)
class _Read:
    """Blocks of a segment from number `first` on, for a tensor (1-D)."""

    segment: Segment
    first: int
    target: Tensor

    @property
    def offset(self) -> int:
        """In the shard's file."""
        return self.segment.offset + self.first * self.segment.block_bytes


def _read_tensors(store: Store, manifest: Manifest, shard: Shard, reads: Sequence[_Read], alone: bool) -> None:
    """Reads of one shard, in order of their places; over the host where the device is another."""
    if all(read.target.device.type == "cpu" for read in reads):
        wanted = [Wanted(read.segment, read.first, bytes_of(read.target)) for read in reads]
        read_blocks(store, manifest.folder, shard, wanted, alone=alone)
        return
    pieces = [piece for read in reads for piece in _bounces(read, manifest.layout.block)]
    bounce = torch.empty(BOUNCE_BYTES, dtype=torch.uint8)
    hosts = [bounce[: piece.target.numel() * piece.target.element_size()] for piece in pieces]
    wanted = [Wanted(piece.segment, piece.first, bytes_of(host)) for piece, host in zip(pieces, hosts, strict=True)]

    def filled(number: int) -> None:
        target = pieces[number].target
        target.copy_(hosts[number].view(target.dtype))

    read_blocks(store, manifest.folder, shard, wanted, filled, alone)


def _bounces(read: _Read, block: int) -> Iterator[_Read]:
    """The read in pieces of at most BOUNCE_BYTES."""
    most = BOUNCE_BYTES // read.segment.block_bytes
    for start in range(0, read.target.numel() // block, most):
        yield _Read(read.segment, read.first + start, read.target[start * block : (start + most) * block])


def _read_buffers(store: Store, manifest: Manifest, subject: Subject) -> None:
    stored = {blob.name: (shard, blob) for shard in manifest.shards for blob in shard.blobs}
    for name, buffer in subject.buffers().items():
        if BUFFER + name not in stored:
            raise Unfit(f"{manifest.folder} does not hold buffer '{name}'")
        shard, blob = stored[BUFFER + name]
        if (blob.dtype, blob.shape) != (DTYPES.get(buffer.dtype), tuple(buffer.shape)):
            raise Unfit(
                f"buffer '{name}' was {blob.dtype} {blob.shape}; the model has {buffer.dtype} {tuple(buffer.shape)}"
            )
        data = read_blob(store, manifest.folder, shard, blob)
        if len(data):
            buffer.copy_(torch.frombuffer(data, dtype=buffer.dtype).view(buffer.shape))
