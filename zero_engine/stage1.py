"""Stage 1 (P_os): optimizer states are sharded. Each rank updates only what it owns and receives the rest.

reduce_grads     exchange pieces -> fold own part                              (N-1)/N P
gather_weights   gather the updated weights from their owners                  (N-1)/N P
"""

from __future__ import annotations

from itertools import groupby

from zero_engine.bulk import BulkSynchronizer
from zero_engine.comm import Arrival, Buffer, Gather
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
        self._spread = self._plan_gathers()
        self._begun, self._spreading = 0, list[Arrival]()  # units whose weights are on their way
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

    def unit_updated(self, unit: int) -> None:
        """Where bytes travel by themselves, they do while the next unit is updated; the same order on every rank."""
        if self._setting.comm.overlaps:
            self._begin(unit)

    def gather_weights(self) -> None:
        self._begin(len(self._setting.blueprint.layout.units))
        for arrival in self._spreading:
            arrival.wait()
        self._spreading, self._begun = [], 0
        self._setting.comm.release(self._buffer)

    def _begin(self, unit: int) -> None:
        """Begin to gather the weights of all units up to `unit` that have not begun."""
        comm = self._setting.comm
        if self._begun == 0:
            comm.publish(self._buffer, "weights")
        for gathers in self._spread[self._begun : unit + 1]:
            self._begun += 1
            self._spreading += [comm.fetch(self._buffer, each, self._buffer.local, "parameters") for each in gathers]

    def _plan_gathers(self) -> list[list[Gather]]:
        """By unit, one for each stretch of trainable runs: frozen weights do not change."""
        blueprint, gathers = self._setting.blueprint, list[list[Gather]]()
        for unit in blueprint.layout.units:
            gathers.append([])
            cut = blueprint.layout.cut(unit.index, blueprint.ranks)
            for trainable, runs in groupby(unit.runs, key=lambda number: blueprint.layout.runs[number].trainable):
                if trainable:
                    parts = tuple(map(self._bytes_in, [(*runs,)] * len(cut), cut))
                    gathers[-1].append(Gather(parts, parts, f"weights of {unit.name or 'the root unit'}"))
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
