"""Gradients of the whole model in one buffer, exchanged once a round: how stages 0 and 1 synchronise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from zero_engine.blueprint import Blueprint
from zero_engine.errors import UsageError
from zero_engine.fold import Round, Task
from zero_engine.reduce import Reducer
from zero_engine.slices import BucketViews
from zero_engine.strategy import AtRest, Setting, came_late


class BulkSynchronizer(AtRest):
    """Folds this rank's micro-batches of a round into one buffer, then exchanges all buckets of it.

    A leaf is copied when it is the first of its chunk and added afterwards; nothing is ever added to zeros. Where bytes
    travel by themselves, a unit leaves during the round's last backward, as soon as it and all units after it are done:
    the same order on every rank, whatever it ran. A rank without work in the round keeps to it too.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting, self._rounds = setting, setting.blueprint.schedule.rounds
        sizes = setting.sizes_of_all(lambda sizes: sizes.gradients)
        self.buffer = setting.arenas.share("gradients", "gradients", sizes)
        self.offsets = offsets_of(setting.blueprint)
        local = self.buffer.local
        kinds = {fold.summed for round in self._rounds for fold in round.folds}
        self._forms = {summed: BucketViews(setting.blueprint, local, self.offsets, summed) for summed in kinds}
        self._order = [unit.index for unit in reversed(setting.blueprint.layout.units)]  # in which units travel
        self._unit_of = {e.ordinal: setting.blueprint.layout.runs[e.run].unit for e in setting.blueprint.layout.entries}
        self._finished: set[int] = set()  # units without further leaves in this round
        self._sent = 0  # units of the order that have left in this round
        self._fold: Callable[[], None] = _nothing  # of the bucket that is on its way
        self._done = 0  # rounds exchanged in this step
        self._folded: set[int] = set()  # parameters with a leaf in the chunk being folded
        self._piece: set[int] = set()  # parameters with a leaf in the running micro-batch
        self._touched = 0

    def use(self, reducer: Reducer) -> None:
        """What folds the pieces that arrive."""
        self._reducer = reducer

    def on_shortage(self, finish: Callable[[int], None]) -> None:
        """There is room for all units."""

    def begin(self, task: Task) -> None:
        self._task = task
        self._piece.clear()
        if task.opens:
            self._folded.clear()
            self._views = self._forms[_is_sum(task.round, self._setting.rank)]
            self._setting.comm.reclaim(self.buffer)
            if task.round is self._rounds[0]:
                self._setting.mailbox.open()

    def accept(self, ordinal: int, leaf: Tensor) -> None:
        if self._unit_of[ordinal] in self._finished:
            raise came_late(self._setting.name_of(ordinal))
        if not self._task.counts:
            return
        if ordinal in self._piece and not self._task.opens:
            raise UsageError(
                f"parameter '{self._views.name(ordinal)}' got two gradients in one backward (re-entrant checkpoint?); "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        self._piece.add(ordinal)
        if ordinal in self._folded:
            self._views.of(ordinal).add_(leaf)
        else:
            self._folded.add(ordinal)
            self._views.of(ordinal).copy_(leaf)

    def unit_done(self, unit: int) -> None:
        if self._task.closes and self._setting.comm.overlaps:
            self._finished.add(unit)
            while self._sent < len(self._order) and self._order[self._sent] in self._finished:
                self._send(self._order[self._sent : self._sent + 1], self._task.round)

    def sync_gradients(self) -> None:
        for ordinal in self._piece:
            self._touched |= 1 << ordinal
        if self._task.closes:
            self._exchange(self._task.round)

    def finish(self) -> int:
        while self._done < len(self._rounds):
            self._exchange(self._rounds[self._done])
        self._done = 0
        touched, self._touched = self._touched, 0
        return touched

    def _exchange(self, round: Round) -> None:
        """Send what has not left yet, and fold everything."""
        self._send(self._order[self._sent :], round)
        self._arrive()
        self._setting.comm.release(self.buffer)
        self._finished.clear()
        self._sent = 0
        self._done += 1

    def _send(self, units: Sequence[int], round: Round) -> None:
        """Begin to exchange the buckets of `units`: while one is folded, the next is on its way."""
        blueprint = self._setting.blueprint
        if round.sends(self._setting.rank):
            for unit in units:
                self._views.zero_except(self._folded, unit)
        if self._sent == 0:
            self._setting.comm.publish(self.buffer, "gradients")
        for unit in units:
            for bucket in blueprint.buckets_in(unit):
                fold = self._reducer.begin(bucket, self.buffer, self.offsets[bucket.index], round, "gradients")
                self._arrive()  # the bucket before
                self._fold = fold
        self._sent += len(units)

    def _arrive(self) -> None:
        """Fold the bucket that is on its way."""
        self._fold()
        self._fold = _nothing


def offsets_of(blueprint: Blueprint) -> dict[int, int]:
    """The byte at which each bucket starts when all stand one after the other."""
    offsets, position = dict[int, int](), 0
    for bucket in blueprint.buckets:
        offsets[bucket.index] = position
        position += bucket.num_bytes(blueprint.schedule.widest)
    return offsets


def _nothing() -> None:
    """No bucket is on its way."""


def _is_sum(round: Round, rank: int) -> bool:
    return any(fold.summed for fold in round.folds if fold.source == rank)
