"""Stage 0: nothing is sharded. Every rank keeps all weights, gradients and optimizer states, as data parallelism does.

Only the *work* of summing is divided: each rank owns a part of the gradients and folds the pieces of that part, then
the parts are gathered. That is the all-reduce of data parallelism in an order we own. Every rank updates everything.

    reduce_grads     exchange pieces -> fold own part                              (N-1)/N P
    (the update)     gather the totals of a unit as it comes to it                 (N-1)/N P
    gather_weights   nothing: every rank has updated all of them
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_engine.buckets import Bucket
from zero_engine.bulk import BulkSynchronizer
from zero_engine.comm import Arrival, Buffer, Sight
from zero_engine.layout import Piece, Range
from zero_engine.master import Master
from zero_engine.reduce import BucketSums, ShardSums, Sums, reducer_of
from zero_engine.resident import Resident
from zero_engine.strategy import GradientSynchronizer, Setting, Totals


class NoShard(Resident):
    """Weights, gradients, masters and moments of everything on every rank."""

    _buffer: Buffer  # holds the totals of everything
    _everything: BucketSums
    _own: Sums  # where the own part is folded: there already, or apart while the buffer is needed for the next round

    def make_master(self) -> Master:
        data = self._setting.arenas.take("parameters", self._setting.sizes.parameters)
        master = self._take_over(data, self._setting.blueprint.layout.pieces(0, 1))
        master.root_last = self._setting.comm.overlaps  # it is large, and would be waited for with nothing else to do
        return master

    def make_synchronizer(self) -> GradientSynchronizer:
        setting, blueprint = self._setting, self._setting.blueprint
        bulk = BulkSynchronizer(setting)
        self._buffer = bulk.buffer
        if blueprint.whole_totals:
            self._buffer = setting.arenas.share("sums", "totals", setting.sizes_of_all(lambda sizes: sizes.total_sums))
        self._everything = self._own = BucketSums(blueprint, self._buffer.local)
        if not (blueprint.whole_totals or blueprint.in_place):
            self._own = ShardSums(setting.arenas.take("sums", setting.sizes.total_sums))
        bulk.use(reducer_of(setting, self._own))
        self._totals = EverybodysTotals(setting, self._everything, self._buffer)
        return bulk

    def reduce_grads(self) -> Totals:
        if self._own is not self._everything:
            self._settle()
        self._totals.publish()
        return self._totals.of

    def _settle(self) -> None:
        """Copy own totals to their place among everybody's, where others may still read this rank's last pieces."""
        self._setting.comm.reclaim(self._buffer)
        for bucket in self._setting.blueprint.buckets:
            for segment in bucket.segments[self._setting.rank]:
                part = segment.bucket
                self._everything.of(bucket, segment, part).copy_(self._own.of(bucket, segment, part))

    def open_weights(self) -> None:
        """Nobody reads another rank's weights."""

    def gather_weights(self) -> None:
        """Every rank has updated all weights: what is left is to let the totals go."""
        self._totals.release()


class EverybodysTotals:
    """The totals of all buckets, each folded by its owners.

    Where ranks share memory the update reads them there, which saves a copy of all gradients; elsewhere all are sent
    for when the first is asked for, and arrive while the update works on those before.
    """

    def __init__(self, setting: Setting, place: BucketSums, buffer: Buffer) -> None:
        self._setting, self._place, self._buffer = setting, place, buffer
        buckets = setting.blueprint.buckets
        self._of_run = {run: (bucket, first) for bucket in buckets for run, first in bucket.offsets}
        self._gathers = [
            (each, place.gather(each, "totals")) for each in sorted(buckets, key=lambda each: each.unit == 0)
        ]
        self._published = self._begun = False
        self._unit = -1  # that the update has come to
        self._sights: dict[int, Sight] = {}  # by bucket number
        self._arriving: dict[int, Arrival] = {}  # by bucket number, where nothing is to be seen

    def publish(self) -> None:
        """The own part is in its place."""
        self._setting.comm.publish(self._buffer, "totals")
        self._published, self._begun, self._unit = True, False, -1

    def of(self, piece: Piece, part: Range) -> Tensor:
        """1-D fp32 totals of elements `part` of `piece`, pieces in order; valid until the next call."""
        bucket, first = self._of_run[piece.run]
        if piece.unit != self._unit:
            self._enter(piece.unit)
        if arrival := self._arriving.pop(bucket.index, None):
            arrival.wait()
        if bucket.index in self._sights:
            start = first + piece.range.start - self._setting.blueprint.layout.runs[piece.run].start + part.start
            return self._seen(bucket, Range(start, start + len(part)), self._place.piece(piece, part))
        return self._place.piece(piece, part)

    def _enter(self, unit: int) -> None:
        """The update comes to a unit."""
        blueprint, comm = self._setting.blueprint, self._setting.comm
        for bucket, gather in () if self._begun else self._gathers:
            sight = comm.look(self._buffer, gather, "gradients")
            if sight is None:
                self._arriving[bucket.index] = comm.fetch(self._buffer, gather, self._buffer.local, "gradients")
            else:
                self._sights[bucket.index] = sight
        for bucket in blueprint.buckets_in(self._unit) if self._begun else ():
            self._leave(bucket)
        self._begun, self._unit = True, unit

    def _seen(self, bucket: Bucket, part: Range, place: Tensor) -> Tensor:
        """Elements `part` of a bucket where their owner has them; put together in `place` where there are several."""
        sight, views = self._sights[bucket.index], list[Tensor]()
        for bytes_, owned in zip(sight.parts, bucket.owners, strict=True):
            common = part.meet(owned)
            if len(common):
                near = slice(4 * (common.start - owned.start), 4 * (common.stop - owned.start))
                views.append(bytes_[near].view(torch.float32))
        if len(views) > 1:
            offset = 0
            for view in views:
                target = place[offset : offset + len(view)]
                if target.data_ptr() != view.data_ptr():
                    target.copy_(view)
                offset += len(view)
        return views[0] if len(views) == 1 else place

    def _leave(self, bucket: Bucket) -> None:
        if sight := self._sights.pop(bucket.index, None):
            sight.close()

    def release(self) -> None:
        """The update is over, or was skipped."""
        for bucket in self._setting.blueprint.buckets:
            self._leave(bucket)
        for arrival in self._arriving.values():
            arrival.wait()
        self._arriving.clear()
        if self._published:
            self._setting.comm.release(self._buffer)
            self._published = False
