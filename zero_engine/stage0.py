"""Stage 0: nothing is sharded. Every rank keeps all weights, gradients and optimizer states, as data parallelism does.

Only the *work* of summing is divided: each rank owns a part of the gradients and folds the pieces of that part, then
the parts are gathered. That is the all-reduce of data parallelism in an order we own. Every rank updates everything.

    reduce_grads     exchange pieces -> fold own part -> gather the totals        2 (N-1)/N P
    gather_weights   nothing: every rank has updated all of them
"""

from __future__ import annotations

from zero_engine.bulk import BulkSynchronizer
from zero_engine.comm import Buffer, Gather
from zero_engine.layout import Range
from zero_engine.master import Master
from zero_engine.reduce import BucketSums, ShardSums, Sums, reducer_of
from zero_engine.resident import Resident
from zero_engine.strategy import GradientSynchronizer, Totals


class NoShard(Resident):
    """Weights, gradients, masters and moments of everything on every rank."""

    _buffer: Buffer  # holds the totals of everything
    _everything: BucketSums
    _own: Sums  # where the own part is folded: there already, or apart while the buffer is needed for the next round

    def make_master(self) -> Master:
        data = self._setting.arenas.take("parameters", self._setting.sizes.parameters)
        return self._take_over(data, self._setting.blueprint.layout.pieces(0, 1))

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
        return bulk

    def reduce_grads(self) -> Totals:
        comm, buckets = self._setting.comm, self._setting.blueprint.buckets
        if self._own is not self._everything:
            self._settle()
        comm.publish(self._buffer, "totals")
        for bucket in buckets:
            start = self._everything.offsets[bucket.index]
            parts = tuple(Range(start + 4 * part.start, start + 4 * part.stop) for part in bucket.owners)
            comm.gather(self._buffer, Gather(parts, parts, "totals"), self._buffer.local, "gradients")
        comm.release(self._buffer)
        return self._everything.piece

    def _settle(self) -> None:
        """Copy own totals to their place among everybody's."""
        for bucket in self._setting.blueprint.buckets:
            for segment in bucket.segments[self._setting.rank]:
                part = segment.bucket
                self._everything.of(bucket, segment, part).copy_(self._own.of(bucket, segment, part))

    def open_weights(self) -> None:
        """Nobody reads another rank's weights."""

    def gather_weights(self) -> None:
        """Every rank has updated all weights."""
