"""The validation loss: every batch on one rank, sums in batch order, so the number of ranks does not change a bit."""

from __future__ import annotations

import torch
import torch.distributed as dist

from workers.build import Loss, moved
from workers.data.batches import Data
from zero_engine import Engine


def evaluate(engine: Engine, data: Data, loss_of_batch: Loss, batches: int) -> float:
    """The mean loss over the targets of at most `batches` validation batches; a collective call, equal on every rank.

    Batch b is computed by rank b mod N. A rank without work in the last round repeats a batch, since at stage 3 all
    ranks gather together; the repeat is left out of the sum.
    """
    count = min(batches, data.validation_batches)
    assert count > 0, "evaluation is off when there is no validation batch"
    rounds = -(-count // engine.ranks)
    sums = torch.zeros(rounds, 2, dtype=torch.float64, device=engine.device)  # loss sum, targets
    was_training = engine.module.training
    engine.module.eval()
    try:
        with torch.no_grad():
            for round in range(rounds):
                batch = moved(data.validation_batch(min(round * engine.ranks + engine.rank, count - 1)), engine.device)
                targets = batch.targets.numel()
                sums[round, 0] = loss_of_batch(engine.module, batch).double() * targets
                sums[round, 1] = targets
    finally:
        engine.module.train(was_training)
    rows = _of_all_ranks(sums, engine.ranks)[:count]  # in batch order
    total, targets_of_all = 0.0, 0.0
    for loss_sum, number in rows:
        total += loss_sum
        targets_of_all += number
    return total / targets_of_all


def _of_all_ranks(sums: torch.Tensor, ranks: int) -> list[list[float]]:
    """Row b is batch b's: ranks gathered, then interleaved."""
    if ranks == 1:
        return [[float(value) for value in row] for row in sums.tolist()]
    gathered = [torch.empty_like(sums) for _ in range(ranks)]
    dist.all_gather(gathered, sums)
    return [[float(value) for value in row] for row in torch.stack(gathered, dim=1).view(-1, 2).tolist()]
