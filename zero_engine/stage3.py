"""Stage 3 (P_os+g+p): weights are sharded too. A unit's weights are gathered for its forward and for its backward.

    before_forward   gather the unit into its slot, unless it is still there       (N-1)/N P
                     and begin to gather the next one: the slot of the one before is free
    after_forward    the slot may be taken by the unit after the next
    before_backward  gather again, unless it is still there; and begin the next    (N-1)/N P
    unit_done        as stage 2                                                    (N-1)/N P
    gather_weights   the root unit comes back, it stays gathered for the whole step

Outside its window a unit's parameters raise when they are used (`released.py`); their shapes and names keep working.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zero_engine.comm import Arrival, Buffer, Gather
from zero_engine.errors import UsageError
from zero_engine.flat import Storage, compute_dtype, write_values
from zero_engine.fold import Task
from zero_engine.layout import Piece, Range
from zero_engine.master import Master
from zero_engine.released import release, restore
from zero_engine.stage2 import ShardedGradients
from zero_engine.standing import Standing
from zero_engine.windows import Foresight, SlotTable, slot_of


class ShardedParameters(ShardedGradients):
    """Everything is sharded; two slots hold the units in use, a third the root unit."""

    def make_master(self) -> Master:
        setting, layout = self._setting, self._setting.blueprint.layout
        self._shards: Buffer = setting.arenas.share(
            "parameters", "shards", setting.sizes_of_all(lambda sizes: sizes.parameters)
        )
        self._pieces = layout.pieces(setting.rank, setting.blueprint.ranks)
        master = Master(setting.blueprint, self._pieces, self._own, setting.state_home, setting.optimizer)
        self._make_slots()
        for unit in layout.units:
            self._take_unit(unit.index, master)
        self._standing = [Standing(members) for members in self._members[1:]]
        self._begin_root()
        self._settle()
        return master

    def _take_unit(self, unit: int, master: Master) -> None:
        """Keep the own part of a unit's first values; its parameters become views into its slot for ever."""
        setting, values = self._setting, self._setting.first.of(unit)
        for piece in (piece for piece in self._pieces if piece.unit == unit):
            write_values(setting.blueprint.layout, piece.run, piece.range, self._own(piece), values)
        master.fill(unit, values)
        Storage(setting.blueprint, range(unit, unit + 1), self._targets[unit]).attach(unit, setting.parameters)
        if unit:
            release(self._members[unit])

    def _make_slots(self) -> None:
        setting, sizes, units = self._setting, self._setting.sizes, self._setting.blueprint.layout.units
        root = setting.arenas.take("slots", sizes.root_slot)
        self._slots = [setting.arenas.take("slots", sizes.slot) for _ in range(sizes.num_slots)]
        self._table, self._inside = SlotTable(), list[int]()
        self._foresight = Foresight()
        self._arriving: dict[int, Arrival] = {}  # by unit: its weights are on their way into its slot
        self._targets = [root, *(self._slots[slot_of(unit.index)] for unit in units[1:])]
        self._gathers = [self._gather_of(unit.index) for unit in units]
        self._members = [self._parameters_of(unit.index) for unit in units]

    def before_forward(self, unit: int) -> None:
        self._enter(unit)
        self._inside.append(unit)

    def after_forward(self, unit: int) -> None:
        if unit in self._inside:  # not where entering failed
            self._inside.remove(unit)
        release(self._members[unit])

    def before_backward(self, unit: int) -> None:
        self._enter(unit)

    def stay(self, unit: int) -> None:
        if self._table.holder(unit) != unit or unit in self._arriving:
            self._enter(unit)

    def unit_done(self, unit: int) -> None:
        super().unit_done(unit)
        if unit:
            release(self._members[unit])

    def begin(self, task: Task) -> None:
        super().begin(task)
        if task.opens and task.round is self._setting.blueprint.schedule.rounds[0]:
            self._forget()  # what an evaluation left in the slots is not counted on
        self._foresight.begin()

    def sync_gradients(self) -> None:
        super().sync_gradients()
        self._settle()
        self._foresight.end()

    def open_weights(self) -> None:
        self._setting.comm.release(self._shards)
        self._setting.comm.reclaim(self._shards)

    def frozen_weights(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        for piece in self._pieces:
            if piece.local is None:
                yield piece, self._own(piece)

    def unit_updated(self, unit: int) -> None:
        """The root unit comes first and is gathered while the others are updated, where bytes travel by themselves."""
        if self._setting.comm.overlaps and not self._arriving:
            self._begin_root()

    def gather_weights(self) -> None:
        if not self._arriving:
            self._begin_root()
        self._settle()

    def _begin_root(self) -> None:
        self._setting.comm.publish(self._shards, "weights")
        self._fetch(0)

    def post_step(self) -> None:
        self._forget()

    def _forget(self) -> None:
        for unit in self._table.holders():
            self._standing[unit - 1].leave()
        self._table.forget()

    def _enter(self, unit: int) -> None:
        for other in self._inside:
            if slot_of(other) == slot_of(unit) and other != unit:
                names = [self._setting.blueprint.layout.units[number].name for number in (other, unit)]
                raise UsageError(f"unit '{names[1]}' runs inside unit '{names[0]}'; make one of them a unit, not both")
        self._take_slot(unit)
        self._settle()
        restore(self._members[unit])
        following = self._foresight.after(unit)
        if following is not None and self._is_free(following, unit):
            self._take_slot(following)

    def _take_slot(self, unit: int) -> None:
        """Begin to gather the unit into its slot, unless it is there; whoever was there is away."""
        before = self._table.holder(unit)
        if self._table.enter(unit):
            if before is not None:
                self._standing[before - 1].leave()
            self._fetch(unit)
            self._standing[unit - 1].come()

    def _is_free(self, unit: int, running: int) -> bool:
        """Whether nobody runs in the unit's slot."""
        return all(slot_of(other) != slot_of(unit) for other in (running, *self._inside))

    def _fetch(self, unit: int) -> None:
        comm = self._setting.comm
        self._arriving[unit] = comm.fetch(self._shards, self._gathers[unit], self._targets[unit], "parameters")

    def _settle(self) -> None:
        """Wait for the weights that are on their way."""
        for arrival in self._arriving.values():
            arrival.wait()
        self._arriving.clear()

    def _gather_of(self, unit: int) -> Gather:
        blueprint = self._setting.blueprint
        sources, targets, position = list[Range](), list[Range](), 0
        for rank in range(blueprint.ranks):
            start = sum(blueprint.own_bytes(earlier, rank) for earlier in range(unit))
            size = blueprint.own_bytes(unit, rank)
            sources.append(Range(start, start + size))
            targets.append(Range(position, position + size))
            position += size
        label = f"weights of {blueprint.layout.units[unit].name or 'the root unit'}"
        return Gather(tuple(sources), tuple(targets), label, checked=unit > 0)

    def _own(self, piece: Piece) -> torch.Tensor:
        """1-D view of an own piece's compute weights."""
        blueprint, start = self._setting.blueprint, 0
        for earlier in self._pieces[: self._pieces.index(piece)]:
            start += len(earlier.range) * blueprint.run_item_bytes(earlier.run)
        size = len(piece.range) * blueprint.run_item_bytes(piece.run)
        return self._shards.local[start : start + size].view(compute_dtype(blueprint, piece.run))

    def _parameters_of(self, unit: int) -> list[torch.nn.Parameter]:
        entries = self._setting.blueprint.layout.entries_of(unit)
        return [self._setting.parameters[entry.ordinal] for entry in entries]
