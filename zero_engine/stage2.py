"""Stage 2 (P_os+g): gradients are sharded too. A unit's gradients travel as soon as its backward is over.

The strategy takes over gradient synchronisation: a unit's bucket is taken from the pool when its first leaf arrives,
exchanged and folded by the owners when the unit is done, and given back. Only the owned part of the sums is kept.

    unit_done        begin to exchange the unit's pieces; fold the unit before     V/N x (N-1)/N P
    gather_weights   as stage 1                                                    (N-1)/N P
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from zero_engine.buckets import Bucket
from zero_engine.comm import Buffer
from zero_engine.fold import Task
from zero_engine.reduce import ShardSums, reducer_of
from zero_engine.slices import BucketViews
from zero_engine.stage1 import ShardedStates
from zero_engine.strategy import AtRest, GradientSynchronizer, Setting, came_late
from zero_engine.windows import slot_of


@dataclass(frozen=True)
class Parcel:
    """Where the gradients of a unit stand, and as what they travel."""

    label: str  # of the unit
    buffer: Buffer
    buckets: Sequence[tuple[Bucket, int]]  # each with the byte at which it starts
    views: BucketViews


class Travelling(NamedTuple):
    """A bucket whose pieces are on their way: its memory is in use until they are folded."""

    buffer: Buffer
    fold: Callable[[], None]
    last: bool  # of its unit


class ShardedGradients(AtRest, ShardedStates):
    """Weights of everything; masters, moments and sums of the owned part; gradients of a unit at a time."""

    def make_synchronizer(self) -> GradientSynchronizer:
        setting, blueprint = self._setting, self._setting.blueprint
        self._pool = BucketPool(setting)
        self._totals = ShardSums(setting.arenas.take("sums", setting.sizes.total_sums))
        self._reducer = reducer_of(setting, self._totals)
        self._unit_of = {e.ordinal: blueprint.layout.runs[e.run].unit for e in blueprint.layout.entries}
        self._sent: set[int] = set()  # units whose piece of this micro-batch has travelled
        self._travelling: Travelling | None = None
        self._touched = set[int]()  # parameters with a leaf in this step
        return self

    def on_shortage(self, finish: Callable[[int], None]) -> None:
        def make_room(unit: int) -> None:
            finish(unit)
            self._arrive()  # its pieces leave the bucket before another unit's enter it

        self._pool.make_room = make_room

    def begin(self, task: Task) -> None:
        self._task = task
        self._sent.clear()
        if task.opens and task.round is self._setting.blueprint.schedule.rounds[0]:
            self._setting.mailbox.open()

    def accept(self, ordinal: int, leaf: Tensor) -> None:
        unit = self._unit_of[ordinal]
        if unit in self._sent:
            raise came_late(self._setting.name_of(ordinal))
        if not self._pool.is_open(unit):
            self._open(unit)
        if self._task.counts:
            self._pool.write(unit, ordinal, leaf)

    def unit_done(self, unit: int) -> None:
        """Its pieces may travel while the next unit computes; those of the unit before have had that time."""
        self._sent.add(unit)
        if not self._pool.is_open(unit):
            self._open(unit)
        parcel = self._pool.parcels.get(unit)
        if parcel is None:
            return
        if self._task.counts:
            self._touched |= self._pool.complete(unit)
        self._setting.comm.publish(parcel.buffer, parcel.label)
        for number, (bucket, offset) in enumerate(parcel.buckets, start=1):
            fold = self._reducer.begin(bucket, parcel.buffer, offset, self._task.round, parcel.label)
            self._arrive()  # the bucket before
            self._travelling = Travelling(parcel.buffer, fold, number == len(parcel.buckets))
        self._pool.close(unit)

    def _open(self, unit: int) -> None:
        """Make the unit's bucket free to be written; nothing for a unit without gradients."""
        parcel = self._pool.parcels.get(unit)
        if parcel is not None:
            if self._travelling is not None and self._travelling.buffer is parcel.buffer:
                self._arrive()
            self._pool.open(unit)

    def _arrive(self) -> None:
        """Fold what is on its way."""
        if self._travelling is not None:
            self._travelling.fold()
            if self._travelling.last:
                self._setting.comm.release(self._travelling.buffer)
            self._travelling = None

    def sync_gradients(self) -> None:
        """Every unit has travelled by itself; the last may still be on its way."""
        self._arrive()

    def finish(self) -> int:
        touched = sum(1 << ordinal for ordinal in self._touched)
        self._touched.clear()
        return touched


class BucketPool:
    """A standing bucket for the root unit, whose gradients come first and last, and two for all the others."""

    def __init__(self, setting: Setting) -> None:
        self._comm, blueprint = setting.comm, setting.blueprint
        self.make_room: Callable[[int], None] = lambda unit: None  # finish a unit whose bucket is needed
        root = setting.arenas.share("buckets", "root-bucket", setting.sizes_of_all(lambda sizes: sizes.root_bucket))
        pool = [
            setting.arenas.share("buckets", f"bucket-{number}", setting.sizes_of_all(lambda sizes: sizes.pool_bucket))
            for number in range(setting.sizes.num_pool_buckets)
        ]
        self.parcels: dict[int, Parcel] = {}  # by unit; none for a unit without gradients
        for unit in blueprint.layout.units:
            offsets, position = dict[int, int](), 0
            for bucket in blueprint.buckets_in(unit.index):
                offsets[bucket.index] = position
                position += bucket.num_bytes(blueprint.schedule.widest)
            if offsets:
                label = f"gradients of {unit.name or 'the root unit'}"
                buffer = pool[slot_of(unit.index)] if unit.index else root
                views = BucketViews(blueprint, buffer.local, offsets, blueprint.schedule.widest)
                buckets = list(zip(blueprint.buckets_in(unit.index), offsets.values(), strict=True))
                self.parcels[unit.index] = Parcel(label, buffer, buckets, views)
        self._written: dict[int, set[int]] = {}  # by open unit: parameters with a leaf

    def is_open(self, unit: int) -> bool:
        """Whether the unit's buffer is being written."""
        return unit in self._written

    def open(self, unit: int) -> None:
        """Take the buffer of a unit that is not open."""
        buffer = self.parcels[unit].buffer
        for other in [other for other in self._written if self.parcels[other].buffer is buffer]:
            self.make_room(other)
        self._comm.reclaim(buffer)
        self._written[unit] = set()

    def write(self, unit: int, ordinal: int, leaf: Tensor) -> None:
        """Copy a leaf in; a second one of the same parameter is added."""
        view, written = self.parcels[unit].views.of(ordinal), self._written[unit]
        if ordinal in written:
            view.add_(leaf)
        else:
            written.add(ordinal)
            view.copy_(leaf)

    def complete(self, unit: int) -> set[int]:
        """Zero what got no leaf, and the padding, where another unit's gradients may have stood: who got one."""
        self.parcels[unit].views.zero_except(self._written[unit], unit)
        return self._written[unit]

    def close(self, unit: int) -> None:
        """The bucket is free for the next unit."""
        del self._written[unit]
