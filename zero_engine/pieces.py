"""The gradient of one micro-batch while it takes several backward calls: built apart, added when it is complete."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from zero_engine.arenas import Arenas
from zero_engine.blueprint import Blueprint
from zero_engine.slices import BucketViews


class Pieces:
    """Leaves of several backward calls, added in the order in which they come, in their own dtype (as `.grad` would).

    The memory is taken when `backward(last=False)` is first used, and is in the plan from then on.
    """

    def __init__(self, blueprint: Blueprint, arenas: Arenas) -> None:
        self._blueprint, self._arenas = blueprint, arenas
        self._views: BucketViews | None = None
        self._written: set[int] = set()
        self._unit_of = {entry.ordinal: blueprint.layout.runs[entry.run].unit for entry in blueprint.layout.entries}
        self.open = False  # whether leaves of the running micro-batch come here

    def accept(self, ordinal: int, leaf: Tensor) -> None:
        """A leaf of any of the calls."""
        view = self._memory().of(ordinal)
        if ordinal in self._written:
            view.add_(leaf)
        else:
            self._written.add(ordinal)
            view.copy_(leaf)

    def drain(self, unit: int) -> Iterator[tuple[int, Tensor]]:
        """The complete pieces of a unit, by parameter number."""
        for ordinal in sorted(ordinal for ordinal in self._written if self._unit_of[ordinal] == unit):
            self._written.discard(ordinal)
            yield ordinal, self._memory().of(ordinal)

    def close(self) -> None:
        """The micro-batch is over."""
        assert not self._written, self._written
        self.open = False

    def _memory(self) -> BucketViews:
        if self._views is None:
            offsets, position = dict[int, int](), 0
            for bucket in self._blueprint.buckets:
                offsets[bucket.index] = position
                position += bucket.num_bytes(summed=False)
            self._views = BucketViews(self._blueprint, self._arenas.take("gradients", position), offsets, summed=False)
            self._blueprint.has_pieces = True
        return self._views
