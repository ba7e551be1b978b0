"""The validation loss is a mean over targets, whatever the batches and the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.engine_cases import adamw, built, tied, tokens
from tests.distributed.rank_pool import Pool, Rank
from workers.data.batches import Batch
from workers.evaluation import evaluate
from zero_engine import Engine, ZeroConfig

COUNTS = (1, 7, 3, 5, 2, 6, 4)  # targets by validation batch, twice each


class Uneven:
    """Validation batches of different lengths."""

    validation_batches = len(COUNTS)

    def validation_batch(self, index: int) -> Batch:
        inputs, targets = tokens(9, index)
        return Batch(inputs[:, : COUNTS[index]], targets[:, : COUNTS[index]])


def _loss(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch.inputs).flatten(0, 1), batch.targets.flatten())


def _evaluated(rank: Rank, stage: int) -> float:
    engine = Engine(built(tied), ZeroConfig(stage, 5, 1), adamw(), rank.group)
    data: Any = Uneven()
    loss = evaluate(engine, data, _loss, 99)
    engine.close()
    return loss


def test_the_validation_loss_weighs_every_target_alike(pool: Pool) -> None:
    """Batches of 1 to 7 targets on 1 rank and on 5, where the last round has work for two of them: one number."""
    model, data = built(tied), Uneven()
    batches = [data.validation_batch(index) for index in range(len(COUNTS))]
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(b.inputs).flatten(0, 1), b.targets.flatten(), reduction="none") for b in batches
        ]
    values = {value for stage in (1, 3) for value in pool.run(5, _evaluated, stage)}
    assert len(values) == 1 and abs(values.pop() - torch.cat(losses).double().mean().item()) < 1e-6
