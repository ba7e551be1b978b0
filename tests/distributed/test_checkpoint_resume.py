"""Resume anywhere: from every (ranks, stage) to every other, the run is the uninterrupted one, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.engine_cases import adamw, built, engine_of, reference_of, tied, train
from tests.distributed.rank_pool import Pool, Rank
from zero_engine import Engine, ZeroConfig
from zero_engine.manifest import Progress

CONFIG = ZeroConfig(micro_batches=4, chunk=2, gradient_clipping=0.5)
SHAPES = [(ranks, stage) for ranks in (1, 2, 3, 4) for stage in (0, 1, 2, 3)]
BEFORE, AFTER = 2, 1  # steps


def save_after(rank: Rank, config: ZeroConfig, steps: int, store: str) -> str:
    """Train, save, and the manifest's digest."""
    engine = engine_of(rank, config, dropout=0.1)
    train(engine, steps)
    manifest = engine.save(store, progress=Progress(data_cursor=16 * steps, schedule={"kind": "constant"}))
    assert manifest.digest == engine.digest()
    engine.close()
    return manifest.digest


def resume_each(rank: Rank, config: ZeroConfig, stores: list[str], steps: int) -> list[tuple[str, list[float]]]:
    """From each store, load and train on: (digest, losses)."""
    found = []
    for store in stores:
        model = built(tied, dropout=0.1)
        for parameter in model.parameters():
            parameter.data.fill_(7.0)  # nothing of a fresh model may survive the load
        engine = Engine.load(store, model, config, adamw(), rank.group)
        results = train(engine, steps)
        found.append((engine.digest(), [result.loss for result in results]))
        engine.close()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_shape_resumes_as_every_other(pool: Pool, memory_path: Path, precision: str) -> None:
    """Checkpoints of sixteen shapes, each read by four and trained on: one digest, that of the uninterrupted run.

    Together they go from every number of ranks to every other and from every stage to every other; each shape by each
    is a soak of `test_resume_anywhere.py`.
    """
    config = replace(CONFIG, precision=precision)
    reference = reference_of(config, dropout=0.1)
    train(reference, BEFORE)
    saved = reference.digest()
    losses = [result.loss for result in train(reference, AFTER)]
    shapes = SHAPES if precision == "fp32" else SHAPES[::5]
    stores = [str(memory_path / f"{ranks}-{stage}") for ranks, stage in shapes]
    for (ranks, stage), store in zip(shapes, stores, strict=True):
        assert pool.run(ranks, save_after, replace(config, stage=stage), BEFORE, store) == [saved] * ranks
    for number, (ranks, stage) in enumerate(shapes):
        read = [stores[(number + 5 * turn) % len(stores)] for turn in range(4)]
        for found in pool.run(ranks, resume_each, replace(config, stage=stage), read, AFTER):
            assert found == [(reference.digest(), losses)] * len(read), f"{ranks} ranks, stage {stage}"
