"""What one rank notes of its micro-batches in a step, until the norm exchange tells it to all."""

from __future__ import annotations

from torch import Tensor

from zero_engine.fold import Task


class Tally:
    """Losses and weights of one step, by micro-batch."""

    def __init__(self) -> None:
        self._losses = dict[int, Tensor]()
        self.weights = dict[int, float]()

    def record(self, task: Task, loss: Tensor, last: bool, weight: float | None) -> None:
        """One backward call of a micro-batch, `last` or not; several add up. A repeat does not count."""
        if not task.counts:
            return
        index, known = task.index, self._losses.get(task.index)
        value = loss.reshape(()).double()
        self._losses[index] = value if known is None else known + value
        if weight is not None:
            self.weights[index] = self.weights.get(index, 0.0) + float(weight)
        elif last:
            self.weights.setdefault(index, 1.0)

    def losses(self) -> dict[int, float]:
        """Fetched from the device: waits for it."""
        return {index: float(loss) for index, loss in self._losses.items()}
