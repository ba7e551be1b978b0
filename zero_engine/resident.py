"""What stages 0, 1 and 2 have in common: all compute weights stay on every rank, windows are always open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from zero_engine.flat import Storage
from zero_engine.layout import Piece
from zero_engine.master import Master
from zero_engine.strategy import Setting


class Resident:
    """Weights in one flat buffer; module windows need nothing."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def _take_over(self, data: Tensor, pieces: Sequence[Piece]) -> Master:
        """Move all weights into `data` (1-D uint8) and keep masters and moments of `pieces`."""
        setting = self._setting
        self._weights = Storage(setting.blueprint, range(len(setting.blueprint.layout.units)), data)
        master = Master(setting.blueprint, pieces, self._weights.piece, setting.state_home, setting.optimizer)
        for unit in setting.blueprint.layout.units:
            self._take_unit(unit.index, master)
        return master

    def _take_unit(self, unit: int, master: Master) -> None:
        """One unit's first values; what they were taken from is free before the next."""
        values = self._setting.first.of(unit)
        self._weights.fill(unit, values)
        master.fill(unit, values)
        self._weights.attach(unit, self._setting.parameters)

    def frozen_weights(self) -> Iterator[tuple[Piece, Tensor]]:
        for piece in self._setting.blueprint.layout.pieces(0, 1):
            if piece.local is None:
                yield piece, self._weights.piece(piece)

    def unit_updated(self, unit: int) -> None:
        """Nothing leaves before all is updated."""

    def post_step(self) -> None:
        """Nothing was borrowed."""

    def before_forward(self, unit: int) -> None:
        """The weights are here."""

    def after_forward(self, unit: int) -> None:
        """The weights stay."""

    def before_backward(self, unit: int) -> None:
        """The weights are here."""

    def stay(self, unit: int) -> None:
        """The weights are here."""
