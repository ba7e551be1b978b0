"""When units are used: which stands in which slot, and in which order their gradients are finished. Torch-free: the
engine and the plan run the same tables.

Note: why slots stand still. Unit i lives in slot i mod 2 for ever. Autograd saves views of weights, so a unit must
come back to the very bytes where forward saw it; and filling a warm slot is three times faster than a fresh one.
"""

from __future__ import annotations

NUM_SLOTS = 2


def slot_of(unit: int) -> int:
    """The slot of a unit; the root unit (0) has one of its own and is not asked for here."""
    return (unit - 1) % NUM_SLOTS


class SlotTable:
    """What each slot holds."""

    def __init__(self) -> None:
        self._holds: list[int | None] = [None] * NUM_SLOTS

    def holder(self, unit: int) -> int | None:
        """The unit in this unit's slot."""
        return self._holds[slot_of(unit)]

    def holders(self) -> list[int]:
        """Units in their slots."""
        return [unit for unit in self._holds if unit is not None]

    def enter(self, unit: int) -> bool:
        """The unit is about to be used; True when its weights must be gathered first."""
        missing = self._holds[slot_of(unit)] != unit
        self._holds[slot_of(unit)] = unit
        return missing

    def forget(self) -> None:
        """Weights have changed, nothing in the slots is current."""
        self._holds = [None] * NUM_SLOTS


class Foresight:
    """Which unit is used after which: as in the micro-batch before, as long as this one goes the same way.

    Nothing is foreseen in the first micro-batch, in an evaluation, or after a unit that came out of turn: a gather that
    nobody asked for would be traffic that no plan has.
    """

    def __init__(self) -> None:
        self._known: list[int] = []  # units in the order of their use
        self._seen: list[int] | None = None  # in the micro-batch under way
        self._same = False  # so far

    def begin(self) -> None:
        """A micro-batch starts."""
        self._seen, self._same = [], True

    def after(self, unit: int) -> int | None:
        """`unit` is used now; the one that will follow."""
        if self._seen is None:
            return None
        place = len(self._seen)
        self._seen.append(unit)
        self._same = self._same and self._known[place : place + 1] == [unit]
        return self._known[place + 1] if self._same and place + 1 < len(self._known) else None

    def end(self) -> None:
        """The micro-batch is over."""
        self._known, self._seen = self._seen or [], None


def gathers_of_step(num_units: int, micro_batches: int) -> list[int]:
    """How often each unit is gathered in a step in which forward runs units 1, 2, ... and backward the reverse."""
    table, counts = SlotTable(), [0] * (num_units + 1)
    for _ in range(micro_batches):
        for unit in (*range(1, num_units + 1), *range(num_units, 0, -1)):
            counts[unit] += table.enter(unit)
    return counts


class BackwardOrder:
    """The order in which units finish in a micro-batch's backward; the same on every rank, whatever it skipped.

    Units finish in reverse order of forward. A unit that this rank did not run still takes its turn, where its number
    says, so that ranks which skip different units stay in step and contribute zeros.
    """

    def __init__(self, num_units: int) -> None:
        self._units = range(1, num_units + 1)
        self.clear()

    def clear(self) -> None:
        """A new micro-batch."""
        self._calls: list[int] = []  # units in order of forward, as often as they were called
        self._left: list[int] | None = None  # the order of backward, once that has begun; next one last
        self._open: dict[int, int] = {}  # calls of a unit whose backward has not been passed

    def record(self, unit: int) -> int:
        """A forward call that may get a backward; its number."""
        self._calls.append(unit)
        self._open[unit] = self._open.get(unit, 0) + 1
        return len(self._calls) - 1

    def reach(self, call: int) -> list[int]:
        """Backward has come to `call`, so all later calls are done: the units that are finished now, in order."""
        left = self._begun()
        for unit in self._calls[call + 1 :]:
            self._open[unit] -= 1
        del self._calls[call + 1 :]
        done = list[int]()
        while left and not self._open.get(left[-1]):
            done.append(left.pop())
        return done

    def force(self, unit: int) -> list[int]:
        """The unit's turn must come now: it and all before it, in order."""
        left, done = self._begun(), list[int]()
        while unit in left:
            done.append(left.pop())
        return done

    def rest(self) -> list[int]:
        """Backward is over: the units that are left, in order."""
        done = self._begun()[::-1]
        self.clear()
        return done

    def _begun(self) -> list[int]:
        if self._left is None:
            order = list(dict.fromkeys(self._calls))[::-1]
            for unit in (unit for unit in reversed(self._units) if unit not in self._open):
                place = next((i for i, other in enumerate(order) if other < unit), len(order))
                order.insert(place, unit)
            self._left = order[::-1]
        return self._left
