"""Stage 1 (P_os): optimizer states are sharded. Each rank updates only what it owns and receives the rest.

reduce_grads     exchange pieces -> fold own part                              (N-1)/N P
gather_weights   gather the updated weights from their owners                  (N-1)/N P
"""

from __future__ import annotations

from itertools import groupby

from zero_engine.bulk import BulkSynchronizer
from zero_engine.comm import Buffer, Gather
from zero_engine.layout import Range
from zero_engine.master import Master
from zero_engine.reduce import BucketSums, ShardSums, Sums, reducer_of
from zero_engine.resident import Resident
from zero_engine.strategy import GradientSynchronizer, Totals


class ShardedStates(Resident):
    """Weights and gradients of everything; masters, moments and totals of the owned part."""

    _buffer: Buffer  # compute weights of everything, which others read after the update
    _totals: Sums

    def make_master(self) -> Master:
        setting = self._setting
        self._buffer = setting.arenas.share("parameters", "weights", setting.sizes_of_all(lambda each: each.parameters))
        pieces = setting.blueprint.layout.pieces(setting.rank, setting.blueprint.ranks)
        master = self._take_over(self._buffer.local, pieces)
        self._gathers = self._plan_gathers()
        return master

    def make_synchronizer(self) -> GradientSynchronizer:
        bulk = BulkSynchronizer(self._setting)
        if self._setting.blueprint.in_place:
            self._totals = BucketSums(self._setting.blueprint, bulk.buffer.local)
        else:
            self._totals = ShardSums(self._setting.arenas.take("sums", self._setting.sizes.total_sums))
        bulk.use(reducer_of(self._setting, self._totals))
        return bulk

    def reduce_grads(self) -> Totals:
        self.open_weights()
        return self._totals.piece

    def open_weights(self) -> None:
        self._setting.comm.reclaim(self._buffer)

    def gather_weights(self) -> None:
        comm = self._setting.comm
        comm.publish(self._buffer, "weights")
        arriving = [comm.fetch(self._buffer, gather, self._buffer.local, "parameters") for gather in self._gathers]
        for arrival in arriving:
            arrival.wait()
        comm.release(self._buffer)

    def _plan_gathers(self) -> list[Gather]:
        """One for each stretch of trainable runs of a unit: frozen weights do not change."""
        blueprint, gathers = self._setting.blueprint, list[Gather]()
        for unit in blueprint.layout.units:
            cut = blueprint.layout.cut(unit.index, blueprint.ranks)
            for trainable, runs in groupby(unit.runs, key=lambda number: blueprint.layout.runs[number].trainable):
                if trainable:
                    parts = tuple(map(self._bytes_in, [(*runs,)] * len(cut), cut))
                    gathers.append(Gather(parts, parts, f"weights of {unit.name or 'the root unit'}"))
        return gathers

    def _bytes_in(self, runs: tuple[int, ...], owned: Range) -> Range:
        """Bytes of the owned part of neighbouring runs."""
        layout = self._setting.blueprint.layout
        parts = [(run, layout.runs[run].range.meet(owned)) for run in runs]
        parts = [(run, part) for run, part in parts if len(part)]
        if not parts:
            return Range(0, 0)
        (first, head), (last, tail) = parts[0], parts[-1]
        return Range(self._weights.byte_of(first, head.start), self._weights.byte_of(last, tail.stop))
