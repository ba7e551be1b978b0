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
        self._weights.fill(setting.initial)
        master = Master(setting.blueprint, pieces, self._weights.piece, setting.state_home(), setting.optimizer)
        master.fill(setting.initial)
        self._weights.attach(setting.parameters)
        return master

    def frozen_weights(self) -> Iterator[tuple[Piece, Tensor]]:
        for piece in self._setting.blueprint.layout.pieces(0, 1):
            if piece.local is None:
                yield piece, self._weights.piece(piece)

    def post_step(self) -> None:
        """Nothing was borrowed."""

    def before_forward(self, unit: int) -> None:
        """The weights are here."""

    def after_forward(self, unit: int) -> None:
        """The weights stay."""

    def before_backward(self, unit: int) -> None:
        """The weights are here."""
