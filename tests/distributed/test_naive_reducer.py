"""All-reduce, then slice, beside the real reduction: the same bits, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.engine_cases import engine_of, reference_of, train
from tests.distributed.rank_pool import Pool, Rank
from zero_engine import ZeroConfig
from zero_engine.arenas import Arenas

NUMBERS: dict[str, Any] = {"micro_batches": 6, "chunk": 2, "gradient_clipping": 0.5}
Costs = tuple[str, dict[str, int], dict[str, int]]


def _run(rank: Rank, config: ZeroConfig) -> Costs:
    """Digest, memory and traffic, each as planned."""
    Arenas.fresh_byte = 0xFF
    try:
        engine = engine_of(rank, config)
        train(engine, 2)
        memory, traffic = engine.memory(), engine.ledger().bytes
        assert memory == engine.plan.memory[rank.rank] and traffic == engine.plan.traffic[rank.rank]
        digest = engine.digest()
        engine.close()
    finally:
        Arenas.fresh_byte = 0
    return digest, memory, traffic


@pytest.mark.parametrize("transport", ["group", "shared"])
@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), (2, 1), (3, 1), (2, 2), (3, 3)])
def test_the_naive_reducer_has_the_same_bits_at_a_known_price(
    pool: Pool, ranks: int, stage: int, transport: str
) -> None:
    """One digest. All sums in fp32 on every rank, sent around once a round; stage 0 needs them and pays nothing."""
    reference = reference_of(ZeroConfig(**NUMBERS))
    train(reference, 2)
    settings: dict[str, Any] = {**NUMBERS, "stage": stage, "transport": transport, "bucket_bytes": 4096}
    real = pool.run(ranks, _run, ZeroConfig(**settings))
    naive = pool.run(ranks, _run, ZeroConfig(**settings, reducer="naive"))
    assert {digest for digest, _, _ in (*real, *naive)} == {reference.digest()}
    rounds = -(-6 // ranks) if stage >= 2 else -(-3 // ranks)
    padded = sum(run.stop - run.start for run in reference.layout.runs)
    for (_, memory, traffic), (_, more_memory, more_traffic) in zip(real, naive, strict=True):
        extra = {name: more_memory[name] - memory[name] for name in memory}
        assert extra == {name: 4 * padded if name == "sums" and stage else 0 for name in memory}
        others = {key: count for key, count in more_traffic.items() if key != "gather/gradients"}
        assert others == {key: count for key, count in traffic.items() if key != "gather/gradients"}
    sent = [sum(traffic.get("gather/gradients", 0) for _, _, traffic in each) for each in (real, naive)]
    assert sent[1] - sent[0] == (rounds * (ranks - 1) * 4 * padded if stage else 0)
