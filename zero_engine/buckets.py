"""What travels together: the trainable runs of a unit, packed, per gradient dtype. Torch-free.

A bucket has its own element numbers, 0 to length: the trainable runs of its unit one after the other, frozen ones left
out. Cutting the unit cuts the bucket into one contiguous range per owner.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_engine.layout import ITEM_BYTES, Layout, Piece, Range


@dataclass(frozen=True)
class Segment:
    """A part of a bucket that one rank owns, inside one run."""

    bucket: Range  # elements of the bucket
    flat: Range  # the same elements in the flat space
    local: int  # where they start in the owner's fp32 buffers


@dataclass(frozen=True)
class Bucket:
    """Gradients of one unit and one leaf dtype."""

    index: int
    unit: int
    dtype: str  # of a gradient leaf
    length: int  # elements, whole blocks
    offsets: tuple[tuple[int, int], ...]  # (run, its first element in the bucket), ascending
    owners: tuple[Range, ...]  # elements of the bucket by owning rank
    segments: tuple[tuple[Segment, ...], ...]  # by owning rank

    def num_bytes(self, summed: bool) -> int:
        """Bytes of the bucket as single leaves, or as fp32 sums."""
        return self.length * (4 if summed else ITEM_BYTES[self.dtype])


def leaf_dtype(dtype: str, compute_dtype: str) -> str:
    """The dtype in which a parameter built as `dtype` computes: fp32 follows the precision, all others stay."""
    return compute_dtype if dtype == "float32" else dtype


def buckets_of(layout: Layout, compute_dtype: str, ranks: int) -> tuple[Bucket, ...]:
    """Every bucket of the model, in unit order."""
    pieces = [layout.pieces(rank, ranks) for rank in range(ranks)]
    buckets = list[Bucket]()
    for unit in layout.units:
        runs = [number for number in unit.runs if layout.runs[number].trainable]
        for dtype in dict.fromkeys(leaf_dtype(layout.runs[number].dtype, compute_dtype) for number in runs):
            length, offsets = 0, dict[int, int]()
            for number in runs:
                if leaf_dtype(layout.runs[number].dtype, compute_dtype) == dtype:
                    offsets[number] = length
                    length += len(layout.runs[number].range)
            segments = tuple(_segments(layout, rank_pieces, offsets) for rank_pieces in pieces)
            owners = _owners(segments)
            buckets.append(Bucket(len(buckets), unit.index, dtype, length, tuple(offsets.items()), owners, segments))
    return tuple(buckets)


def _segments(layout: Layout, pieces: tuple[Piece, ...], offsets: dict[int, int]) -> tuple[Segment, ...]:
    found = list[Segment]()
    for piece in pieces:
        if piece.run in offsets and piece.local is not None:
            start = offsets[piece.run] + piece.range.start - layout.runs[piece.run].start
            found.append(Segment(Range(start, start + len(piece.range)), piece.range, piece.local))
    return tuple(found)


def _owners(segments: tuple[tuple[Segment, ...], ...]) -> tuple[Range, ...]:
    owners, end = list[Range](), 0
    for parts in segments:
        start, end = end, parts[-1].bucket.stop if parts else end
        owners.append(Range(start, end))
    return tuple(owners)
