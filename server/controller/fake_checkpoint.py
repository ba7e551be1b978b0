"""A tiny real checkpoint, written by simulated ranks: files, manifest and checksums as an engine's."""

from __future__ import annotations

import struct
from datetime import datetime

from workers.contract import CheckpointRecord, LaunchOrder, ShardRecord
from zero_engine.layout import Layout, ParameterSpec
from zero_engine.manifest import Arithmetic, Environment, Manifest, Progress, folder_name
from zero_engine.shard import MANIFEST, Source, write_shard
from zero_engine.store import Store

_LAYOUT = Layout.build((ParameterSpec("weight", (256,)),))
_BLOCK_BYTES = _LAYOUT.block * 4


def write(store: Store, order: LaunchOrder, step: int, at: datetime) -> CheckpointRecord:
    """Every rank's shard, then the manifest. Returns what rank 0 reports."""
    folder = folder_name(step, order.fence)
    shards = tuple(write_shard(store, folder, rank, _sources(rank, step), []) for rank in range(order.world_size))
    stage = order.spec.zero.stage
    assert stage != "auto", "an order's stage is a number"
    manifest = Manifest(
        step=step,
        fence=order.fence,
        ranks=order.world_size,
        stage=stage,
        digest=f"{step:016x}",
        arithmetic=Arithmetic(order.spec.train.seed, order.spec.train.micro_batches, order.chunk, "fp32"),
        environment=Environment(device="cpu", torch="none", threads=1),
        layout=_LAYOUT,
        optimizer={"kind": "adamw", "moments": []},
        scalars={"counts": [step]},
        progress=Progress(data_cursor=step * order.spec.train.global_batch, data_hash="fake"),
        shards=shards,
        created=at.isoformat(),
    )
    store.put(f"{folder}/{MANIFEST}", manifest.encode())
    return CheckpointRecord(
        at=at,
        step=step,
        folder=folder,
        digest=manifest.digest,
        ranks=order.world_size,
        stage=stage,
        shards=[ShardRecord(rank=s.rank, file=s.file, bytes=s.file_bytes, checksum=s.checksum) for s in shards],
        seconds=0.0,
    )


def _sources(rank: int, step: int) -> list[Source]:
    if rank > 0:
        return []
    data = memoryview(struct.pack(f"<{_LAYOUT.block}f", *([float(step)] * _LAYOUT.block)))
    return [Source("master", "F32", 0, _BLOCK_BYTES, data)]
