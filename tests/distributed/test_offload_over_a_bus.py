"""Offload as a GPU does it: sums leave during backward, weights return during the update, and no bit notices."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.engine_cases import adamw, built, engine_of, mean_loss, tied, train
from tests.distributed.late_copies import LateCopies, over_a_bus
from tests.distributed.rank_pool import Pool, Rank
from zero_engine import Engine, ZeroConfig

NUMBERS: dict[str, Any] = {"micro_batches": 4, "chunk": 2, "gradient_clipping": 0.5, "transport": "group"}


def _bad_once(module: Any, step: int, index: int) -> Any:
    """Step 1 has no finite loss: what left the device for it must not be taken for step 2's."""
    return mean_loss(module, step, index) * (float("inf") if (step, index) == (1, 2) else 1.0)


def _trained(engine: Engine) -> tuple[str, list[bool]]:
    skipped = [result.skipped for result in train(engine, 4, _bad_once)]
    digest = engine.digest()
    assert engine.memory() == engine.plan.memory[engine.rank]
    engine.close()
    return digest, skipped


def _alone(stage: int, precision: str, offload: str = "cpu") -> tuple[str, list[bool]]:
    return _trained(Engine(built(tied), ZeroConfig(stage, **NUMBERS, precision=precision, offload=offload), adamw()))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_copies_may_take_place_at_any_moment_until_they_are_waited_for(precision: str) -> None:
    """At once, as late as they may, and in between: the bits without offload, at every stage, a skipped step too."""
    expected = _alone(0, precision, "none")
    assert expected[1] == [False, True, False, False]
    for stage in (0, 1, 2, 3):
        for chance in (0.0, 0.4):
            with over_a_bus(chance, stage) as made:
                assert _alone(stage, precision) == expected, (stage, chance)
            assert made[0].most > 1, "nothing was under way beside anything else"


def test_sums_leave_before_the_last_backward_is_over() -> None:
    """At stage 2 a unit's sums are on their way while units before it still compute their backward."""
    with over_a_bus(0.0) as made:
        engine = Engine(built(tied), ZeroConfig(2, **NUMBERS, offload="cpu"), adamw())
    during = list[int]()
    engine.module.get_submodule("blocks.0").register_full_backward_hook(lambda *_: during.append(made[0].begun))
    train(engine, 1)
    engine.close()
    assert during[:3] == [0, 0, 0] and during[3] > 0, "not before the last micro-batch, and then during it"


def _together(rank: Rank, stage: int, expected: str) -> list[LateCopies]:
    with over_a_bus(0.3, rank.rank) as made:
        digest, _ = _trained(engine_of(rank, ZeroConfig(stage, **NUMBERS, offload="cpu", precision="bf16")))
    assert digest == expected
    return [each.begun for each in made]


def test_several_ranks_offload_to_the_bits_of_one(pool: Pool) -> None:
    """Owned sums leave early, the others' when they have come (stage 0); weights go round only once they are back."""
    expected, _ = _alone(0, "bf16", "none")
    for ranks, stage in ((2, 0), (3, 1), (2, 3)):
        assert all(pool.run(ranks, _together, stage, expected))
