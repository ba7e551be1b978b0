"""Gradients as views into buckets: where each parameter's leaf is written, and what must be zero around it."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from zero_engine.blueprint import Blueprint
from zero_engine.buckets import Bucket
from zero_engine.flat import gaps_of


class BucketViews:
    """The trainable parameters of some buckets inside one byte tensor."""

    def __init__(self, blueprint: Blueprint, data: Tensor, offsets: dict[int, int], summed: bool) -> None:
        self._views: dict[int, Tensor] = {}
        self._gaps: dict[int, list[Tensor]] = {}  # by unit
        self._ordinals: dict[int, set[int]] = {}  # by unit
        self._names: dict[int, str] = {}
        for bucket in blueprint.buckets:
            if bucket.index in offsets:
                dtype = dtype_of(bucket, summed)
                start = offsets[bucket.index]
                self._add(blueprint, bucket, data[start : start + bucket.length * dtype.itemsize].view(dtype))

    def _add(self, blueprint: Blueprint, bucket: Bucket, flat: Tensor) -> None:
        layout = blueprint.layout
        ordinals, gaps = self._ordinals.setdefault(bucket.unit, set()), self._gaps.setdefault(bucket.unit, [])
        for run, offset in bucket.offsets:
            for entry in layout.entries_of(bucket.unit):
                if entry.run == run:
                    start = offset + entry.start - layout.runs[run].start
                    self._views[entry.ordinal] = flat[start : start + entry.spec.numel].view(entry.spec.shape)
                    self._names[entry.ordinal] = entry.spec.name
                    ordinals.add(entry.ordinal)
            gaps += [flat[offset + start : offset + stop] for start, stop in gaps_of(layout, run)]

    def of(self, ordinal: int) -> Tensor:
        """Where the leaf of parameter number `ordinal` goes, in the parameter's shape."""
        return self._views[ordinal]

    def name(self, ordinal: int) -> str:
        """The parameter's name."""
        return self._names[ordinal]

    def zero_except(self, written: Collection[int], unit: int) -> None:
        """Zero the padding of a unit and every parameter of it that is not in `written`."""
        unwritten = self._ordinals.get(unit, set()).difference(written)
        if zeroed := [*self._gaps.get(unit, ()), *(self._views[ordinal] for ordinal in unwritten)]:
            torch._foreach_zero_(zeroed)


def dtype_of(bucket: Bucket, summed: bool) -> torch.dtype:
    """The dtype in which a bucket's piece stands: fp32 for a sum, else that of a leaf."""
    dtype = torch.float32 if summed else getattr(torch, bucket.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
