"""The bits do not depend on the stage or the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.engine_cases import engine_of, reference_of, train
from tests.distributed.rank_pool import Pool, Rank
from zero_engine import ZeroConfig

STEPS = 20


def _run(rank: Rank, config: ZeroConfig, steps: int) -> tuple[str, list[float], list[float]]:
    engine = engine_of(rank, config)
    results = train(engine, steps)
    digest = engine.digest()
    engine.close()
    return digest, [result.loss for result in results], [result.grad_norm for result in results]


def test_sixteen_runs_and_the_reference_have_one_digest(pool: Pool) -> None:
    """V=8, C=2, ranks 1 to 4 x stages 0 to 3: digest, losses and norms of 20 clipped steps equal the plain loop's."""
    config = ZeroConfig(micro_batches=8, chunk=2, gradient_clipping=0.5)
    reference = reference_of(config)
    results = train(reference, STEPS)
    expected = (reference.digest(), [r.loss for r in results], [r.grad_norm for r in results])
    assert max(expected[2]) > 0.5, "clipping never took place"
    for ranks in (1, 2, 3, 4):
        for stage in (0, 1, 2, 3):
            outcomes = pool.run(ranks, _run, ZeroConfig(**{**vars(config), "stage": stage}), STEPS)
            assert outcomes == [expected] * ranks, f"{ranks} ranks, stage {stage}"


SHAPES = [(8, 1), (8, 8), (8, 3), (6, 2)]  # (V, C)
TOGETHER = [("group", "fp32"), ("shared", "bf16"), ("shared", "fp32"), ("group", "bf16")]


def half_now_half_in_the_soak() -> list[Any]:
    """Every shape with both transports and both precisions, each pair of the two once."""
    return [
        pytest.param(*shape, *pair, marks=[pytest.mark.soak] if (number + other // 2) % 2 else [])
        for number, shape in enumerate(SHAPES)
        for other, pair in enumerate(TOGETHER)
    ]


@pytest.mark.parametrize(("micro_batches", "chunk", "transport", "precision"), half_now_half_in_the_soak())
def test_chunks_transports_and_precisions_keep_one_digest(
    pool: Pool, micro_batches: int, chunk: int, transport: str, precision: str
) -> None:
    """Whatever V, C, transport and precision, ranks 1 to 5 at all stages agree with the plain loop."""
    settings = {"micro_batches": micro_batches, "chunk": chunk, "gradient_clipping": 0.5, "precision": precision}
    reference = reference_of(ZeroConfig(**settings))
    train(reference, 3)
    for ranks, stage in ((1, 2), (2, 0), (2, 3), (3, 1), (3, 2), (4, 3), (5, 0), (5, 2)):
        config = ZeroConfig(**settings, stage=stage, transport=transport, bucket_bytes=4096)
        digests = {digest for digest, _, _ in pool.run(ranks, _run, config, 3)}
        assert digests == {reference.digest()}, f"{ranks} ranks, stage {stage}"
