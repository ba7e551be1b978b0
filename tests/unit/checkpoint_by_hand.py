"""Checkpoints made without torch, for tests of everything that must not need it."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from zero_engine.layout import Layout, ParameterSpec
from zero_engine.manifest import Arithmetic, Environment, Manifest, Progress
from zero_engine.shard import (
    BUFFER,
    NamedSource,
    Record,
    Source,
    publish,
    put_record,
    wait_for_records,
    write_shard,
)
from zero_engine.store import Store

SPECS = (
    ParameterSpec("embed.weight", (40, 10), aliases=("head.weight",)),
    ParameterSpec("blocks.0.weight", (30, 33), unit="blocks.0"),
    ParameterSpec("blocks.0.bias", (33,), unit="blocks.0"),
    ParameterSpec("blocks.0.frozen", (7, 3), unit="blocks.0", trainable=False),
    ParameterSpec("blocks.1.weight", (30, 33), unit="blocks.1"),
    ParameterSpec("scale", ()),
    ParameterSpec("nothing", (0, 4)),
)
KINDS = ("master", "exp_avg", "exp_avg_sq")


def value(kind: str, element: int) -> float:
    """The number that a test checkpoint holds at a flat element."""
    return float(element * 4 + KINDS.index(kind) if kind in KINDS else -element)


@dataclass(frozen=True)
class ByHand:
    """Writes a checkpoint of SPECS rank by rank."""

    store: Store
    step: int = 5
    fence: int = 1
    ranks: int = 2
    layout: Layout = field(default_factory=lambda: Layout.build(SPECS))

    @property
    def folder(self) -> str:
        return f"step-{self.step:010d}-attempt-{self.fence:06d}"

    def sources(self, rank: int) -> list[Source]:
        sources = []
        for piece in self.layout.pieces(rank, self.ranks):
            block = self.layout.block
            for kind in KINDS if piece.local is not None else ("frozen",):
                numbers = [
                    value(kind, element) + self.step / 8 for element in range(piece.range.start, piece.range.stop)
                ]
                data = memoryview(bytearray(struct.pack(f"<{len(numbers)}f", *numbers)))
                sources.append(Source(kind, "F32", piece.range.start // block, block * 4, data))
        return sources

    def write_shard(self, rank: int) -> None:
        running = NamedSource(f"{BUFFER}norm.mean", "F32", (3,), memoryview(struct.pack("<3f", 1, 2, 3)))
        shard = write_shard(self.store, self.folder, rank, self.sources(rank), [running] if rank == 0 else [])
        put_record(self.store, self.folder, Record(shard, digest_part=rank + 1, ticket="t"))

    def publish(self) -> Manifest:
        """The whole save, in its order."""
        for rank in range(self.ranks):
            self.write_shard(rank)
        records = wait_for_records(self.store, self.folder, self.ranks, "t", patience_seconds=1)
        return publish(self.store, self.draft(), records)

    def draft(self) -> Manifest:
        return Manifest(
            step=self.step,
            fence=self.fence,
            ranks=self.ranks,
            stage=2,
            digest="",
            arithmetic=Arithmetic(seed=1, micro_batches=4, chunk=2, precision="fp32"),
            environment=Environment(device="cpu", torch="2.13.0", threads=1),
            layout=self.layout,
            optimizer={"kind": "adamw", "moments": ["exp_avg", "exp_avg_sq"]},
            scalars={"counts": [self.step] * len(SPECS)},
            progress=Progress(data_cursor=80, data_hash="abc", schedule={"kind": "constant"}, extra={"名": "é"}),
            shards=(),
        )
