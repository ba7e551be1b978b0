"""The owner's side of an exchange: pieces arrive, and are folded in the one order (`fold.py`) into totals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from zero_engine.blueprint import Blueprint
from zero_engine.buckets import Bucket, Segment
from zero_engine.clip import block_sums
from zero_engine.comm import Buffer, Comm, Exchange, Gather
from zero_engine.fold import Fold, Round
from zero_engine.layout import Piece, Range
from zero_engine.states import StateHome
from zero_engine.strategy import Setting


class Sums(Protocol):
    """fp32 sums of the elements this rank owns."""

    def of(self, bucket: Bucket, segment: Segment, part: Range) -> Tensor:
        """1-D fp32 view of elements `part` of `bucket`, which lie in `segment`."""

    def piece(self, piece: Piece, part: Range) -> Tensor:
        """The same by piece: `part` counts from the start of the piece."""


class ShardSums:
    """Back to back in the order of the rank's pieces: the small form."""

    def __init__(self, data: Tensor) -> None:
        self.flat = data.view(torch.float32)

    def of(self, bucket: Bucket, segment: Segment, part: Range) -> Tensor:
        start = segment.local + part.start - segment.bucket.start
        return self.flat[start : start + len(part)]

    def piece(self, piece: Piece, part: Range) -> Tensor:
        assert piece.local is not None
        return self.flat[piece.local + part.start : piece.local + part.stop]


class BucketSums:
    """In the shape of all buckets, this rank's part filled: so that stage 0 can gather the rest around it."""

    def __init__(self, blueprint: Blueprint, data: Tensor) -> None:
        self._flat = data.view(torch.float32)
        self.offsets, position = dict[int, int](), 0  # first byte by bucket number
        self._runs: dict[int, int] = {}  # place by run, less the run's first flat element
        for bucket in blueprint.buckets:
            self.offsets[bucket.index] = 4 * position
            for run, offset in bucket.offsets:
                self._runs[run] = position + offset - blueprint.layout.runs[run].start
            position += bucket.length

    def of(self, bucket: Bucket, segment: Segment, part: Range) -> Tensor:
        start = self.offsets[bucket.index] // 4
        return self._flat[start + part.start : start + part.stop]

    def piece(self, piece: Piece, part: Range) -> Tensor:
        start = self._runs[piece.run] + piece.range.start
        return self._flat[start + part.start : start + part.stop]

    def gather(self, bucket: Bucket, label: str) -> Gather:
        """Every owner's part of a bucket, to the same place on every rank."""
        start = self.offsets[bucket.index]
        parts = tuple(Range(start + 4 * part.start, start + 4 * part.stop) for part in bucket.owners)
        return Gather(parts, parts, label)


@dataclass(eq=False)
class _Stride:
    """A stretch of an arriving part that is folded at once, and where."""

    start: int  # elements from the start of the part
    stop: int
    kept: Tensor  # 1-D fp32: the total
    chunk: Tensor  # 1-D fp32: the open chunk's sum
    total: Tensor  # 1-D fp32: space for a total that may not be written yet
    rows: Tensor  # fp32: `kept`, a block a row
    doubles: Tensor  # fp64, of the same shape
    sums: Tensor  # 1-D fp64, one per block
    parts: Sequence[Tensor | None] = ()  # the pieces of the part that came last,
    near: Sequence[Tensor | None] = ()  # and the stretch of each

    def of(self, parts: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The stretch of each piece of the part: cut once where the same pieces come every time."""
        if parts is not self.parts:
            self.parts = parts
            self.near = [None if part is None else part[self.start : self.stop] for part in parts]
        return self.near


class Reducer:
    """Exchanges one bucket and folds what arrives, a stride at a time so that it stays in cache.

    When a bucket's last round is folded, the block sums of the result are taken while it is still warm.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        comm: Comm,
        totals: Sums,
        chunks: ShardSums | None,
        scratch: Tensor,
        norms: Tensor,
        home: StateHome,
    ) -> None:
        self._blueprint, self._comm, self._totals, self._chunks = blueprint, comm, totals, chunks
        self._home = home  # is told which totals are final
        stride = self._stride = blueprint.stride
        self._spare_total = scratch[: 4 * stride].view(torch.float32)
        self._spare_chunk = scratch[4 * stride : 8 * stride].view(torch.float32)
        self._doubles = scratch[8 * stride : 16 * stride].view(torch.float64)
        self._norms = norms  # 1-D fp64, one per block this rank owns
        self._strides: dict[tuple[int, int], list[_Stride]] = {}  # by bucket and first element of an arriving part
        self._requests: dict[tuple[int, tuple[str | None, ...]], Exchange] = {}  # by bucket and dtypes of the pieces
        self._results: dict[int, list[tuple[Range, Tensor]]] = {}  # by bucket: own flat elements, and their totals

    def begin(self, bucket: Bucket, buffer: Buffer, offset: int, round: Round, label: str) -> Callable[[], None]:
        """Begin to exchange `bucket`, which everybody publishes at byte `offset` of `buffer`; the call folds it.

        A bucket comes with the same offset and label every time.
        """
        dtypes = self._dtypes(bucket, round)
        request = self._requests.get((bucket.index, dtypes))
        if request is None:
            request = self._requests[bucket.index, dtypes] = Exchange(offset, bucket.owners, dtypes, label)
        return partial(self._finish, bucket, round, self._comm.exchange(buffer, request, "gradients"))

    def _finish(self, bucket: Bucket, round: Round, arriving: Iterable[tuple[Range, list[Tensor | None]]]) -> None:
        self._fold_all(bucket, round, arriving)
        if round is self._blueprint.schedule.rounds[-1]:
            for part, totals in self._results_of(bucket):
                self._home.settled(part, totals)

    def _fold_all(self, bucket: Bucket, round: Round, arriving: Iterable[tuple[Range, list[Tensor | None]]]) -> None:
        last = round is self._blueprint.schedule.rounds[-1]
        for part, pieces in arriving:
            for stride in self._strides_of(bucket, part):
                self._fold(stride, stride.of(pieces), round.folds, last)

    def _dtypes(self, bucket: Bucket, round: Round) -> tuple[str | None, ...]:
        made: list[str | None] = [None] * self._blueprint.ranks
        for fold in round.folds:
            made[fold.source] = "float32" if fold.summed else bucket.dtype
        return tuple(made)

    def _fold(self, stride: _Stride, pieces: Sequence[Tensor | None], folds: tuple[Fold, ...], last: bool) -> None:
        kept = stride.kept
        total = stride.total if self._blueprint.in_place and len(folds) > 2 else kept
        before = kept if self._blueprint.schedule.carries_total else total
        result = fold_pieces(pieces, folds, stride.chunk, before, total, kept)
        if result is not kept and result.data_ptr() != kept.data_ptr():
            kept.copy_(result)
        if last:
            block_sums(stride.rows, self._blueprint.config.clip_norm, stride.doubles, stride.sums)

    def _strides_of(self, bucket: Bucket, part: Range) -> list[_Stride]:
        """The strides of an arriving part of a bucket: views that never move, made once."""
        strides = self._strides.get((bucket.index, part.start))
        if strides is None:
            strides = self._strides[bucket.index, part.start] = list(self._cut(bucket, part))
        return strides

    def _results_of(self, bucket: Bucket) -> list[tuple[Range, Tensor]]:
        """What is told of a bucket when it is folded: views that never move, made once."""
        if bucket.index not in self._results:
            segments = bucket.segments[self._comm.rank]
            self._results[bucket.index] = [(each.flat, self._totals.of(bucket, each, each.bucket)) for each in segments]
        return self._results[bucket.index]

    def _cut(self, bucket: Bucket, part: Range) -> Iterator[_Stride]:
        block = self._blueprint.layout.block
        for segment in bucket.segments[self._comm.rank]:
            common = part.meet(segment.bucket)
            for start in range(common.start, common.stop, self._stride):
                here = Range(start, min(start + self._stride, common.stop))
                length, kept = len(here), self._totals.of(bucket, segment, here)
                first = (segment.local + start - segment.bucket.start) // block
                yield _Stride(
                    start - part.start,
                    here.stop - part.start,
                    kept,
                    self._spare_chunk[:length] if self._chunks is None else self._chunks.of(bucket, segment, here),
                    self._spare_total[:length],
                    kept.view(-1, block),
                    self._doubles[:length].view(-1, block),
                    self._norms[first : first + length // block],
                )


class NaiveReducer(Reducer):
    """All-reduce, then slice: what reduce-scatter saves. Every rank gets every sum and takes its own slice from them.

    For comparison: the bits are the same, each round sends (N-1)/N of the sums more, and they take the memory of all
    gradients in fp32 on every rank, whatever the stage.
    """

    def __init__(self, setting: Setting, totals: Sums, chunks: ShardSums | None) -> None:
        norms = setting.mailbox.block_sums
        super().__init__(setting.blueprint, setting.comm, totals, chunks, setting.scratch, norms, setting.state_home)
        self._whole = setting.arenas.share("sums", "reduced", setting.sizes_of_all(lambda sizes: sizes.reduced))
        self._slices = BucketSums(setting.blueprint, self._whole.local)

    def _fold_all(self, bucket: Bucket, round: Round, arriving: Iterable[tuple[Range, list[Tensor | None]]]) -> None:
        super()._fold_all(bucket, round, arriving)
        comm = self._comm
        own = [(segment, segment.bucket) for segment in bucket.segments[comm.rank]]
        comm.reclaim(self._whole)
        for segment, part in own:
            self._slices.of(bucket, segment, part).copy_(self._totals.of(bucket, segment, part))
        comm.publish(self._whole, "sums for everybody")
        comm.gather(self._whole, self._slices.gather(bucket, "sums for everybody"), self._whole.local, "gradients")
        comm.release(self._whole)
        for segment, part in own:
            self._totals.of(bucket, segment, part).copy_(self._slices.of(bucket, segment, part))


def fold_pieces(
    pieces: Sequence[Tensor | None],
    folds: Sequence[Fold],
    chunk_space: Tensor,
    total: Tensor,
    total_space: Tensor,
    kept: Tensor,
) -> Tensor:
    """Fold the pieces of one round; returns the new total, in `kept`, `total_space` or one of the inputs.

    `chunk_space` holds the open chunk's sum between rounds, `total` the total so far. A single fp32 piece stands for a
    sum without being copied; narrower pieces are widened first. `kept` may be the memory of a piece: only the last sum
    is written there, when no piece is read any more.
    """
    chunk = chunk_space
    for fold in folds:
        piece = pieces[fold.source]
        assert piece is not None, fold
        if not fold.opens:
            chunk = torch.add(chunk, piece, out=chunk_space)
        elif piece.dtype == torch.float32:
            chunk = piece
        else:
            chunk = chunk_space.copy_(piece)
        if fold.closes:
            space = kept if fold is folds[-1] else total_space
            total = _started(chunk, total_space, chunk_space) if fold.first else torch.add(total, chunk, out=space)
    if not folds[-1].closes and chunk.data_ptr() != chunk_space.data_ptr():
        chunk_space.copy_(chunk)
    return total


def _started(chunk: Tensor, total_space: Tensor, chunk_space: Tensor) -> Tensor:
    """The first chunk sum as a total; moved out of the space that the next chunk will use."""
    return total_space.copy_(chunk) if chunk.data_ptr() == chunk_space.data_ptr() else chunk


def reducer_of(setting: Setting, totals: Sums) -> Reducer:
    """The reducer of a strategy that folds into `totals`, with a chunk sum where one stays open between rounds."""
    size = setting.sizes.chunk_sums
    chunks = ShardSums(setting.arenas.take("sums", size)) if size else None
    if setting.blueprint.naive:
        return NaiveReducer(setting, totals, chunks)
    norms = setting.mailbox.block_sums
    return Reducer(setting.blueprint, setting.comm, totals, chunks, setting.scratch, norms, setting.state_home)
