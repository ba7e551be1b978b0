"""Two steps of the user's own model in the chosen configuration, against the plain loop, before step 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero_engine.config import ZeroConfig
from zero_engine.errors import DivergedError
from zero_engine.reference import Reference
from zero_engine.refit import Belongings

STEPS = 2
LossOf = Callable[[nn.Module, int, int], Tensor]  # (module, step, micro-batch number) -> loss


def run_steps(trainer: Any, loss_of: LossOf) -> None:
    """`STEPS` steps of an Engine or a Reference."""
    for step in range(STEPS):
        for index in trainer.micro_batches():
            trainer.backward(loss_of(trainer.module, step, index))
        trainer.step()


def reference_after(
    build: Callable[[], nn.Module], config: ZeroConfig, optimizer: Any, start: Belongings, loss_of: LossOf
) -> Reference:
    """The plain loop from the same weights."""
    model = build()
    with torch.no_grad():
        for name, value in start.weights.items():
            model.get_parameter(name).copy_(value)
    reference = Reference(model, config, optimizer)
    run_steps(reference, loss_of)
    return reference


def compare(digest: str, reference: Reference, weights: Mapping[str, Tensor]) -> None:
    """Raises DivergedError naming the first parameter that is not the plain loop's."""
    if digest == reference.digest():
        return
    names = [n for n, value in reference.masters.items() if not torch.equal(weights[n].reshape(-1), value.reshape(-1))]
    where = f"parameter '{names[0]}' differs" if names else "an optimizer state differs"
    raise DivergedError(
        f"self-test: after {STEPS} steps {where} from the plain loop. Does the model or loss use its own randomness, "
        "buffers, or the rank?"
    )
