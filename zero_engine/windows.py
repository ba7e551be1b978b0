"""Which unit's weights stand in which slot at stage 3. Torch-free: the engine and the plan run the same table.

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

    def enter(self, unit: int) -> bool:
        """The unit is about to be used; True when its weights must be gathered first."""
        missing = self._holds[slot_of(unit)] != unit
        self._holds[slot_of(unit)] = unit
        return missing

    def forget(self) -> None:
        """Weights have changed, nothing in the slots is current."""
        self._holds = [None] * NUM_SLOTS


def gathers_of_step(num_units: int, micro_batches: int) -> list[int]:
    """How often each unit is gathered in a step in which forward runs units 1, 2, ... and backward the reverse."""
    table, counts = SlotTable(), [0] * (num_units + 1)
    for _ in range(micro_batches):
        for unit in (*range(1, num_units + 1), *range(num_units, 0, -1)):
            counts[unit] += table.enter(unit)
    return counts
