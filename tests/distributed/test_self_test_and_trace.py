"""The engine tests itself on the user's model, and shows where time goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.engine_cases import Tied, adamw, built, engine_of, mean_loss, tied, train
from tests.distributed.rank_pool import Pool, Rank
from zero_engine import Engine, ZeroConfig
from zero_engine.errors import DivergedError
from zero_engine.trace import PHASES

NUMBERS: dict[str, Any] = {"micro_batches": 4, "chunk": 2, "gradient_clipping": 0.5}


def _fresh_tied() -> nn.Module:
    return built(tied)


def _self_tested(rank: Rank, stage: int, precision: str) -> tuple[str, str]:
    config = ZeroConfig(**NUMBERS, stage=stage, precision=precision)
    engine = engine_of(rank, config)
    engine.self_test(_fresh_tied, mean_loss)
    train(engine, 2)
    digest = engine.digest()
    engine.close()
    other = engine_of(rank, config)
    train(other, 2)
    expected = other.digest()
    other.close()
    return digest, expected


def test_a_self_test_leaves_no_trace(pool: Pool) -> None:
    """After it the run has the bits of a run without it."""
    for ranks, stage, precision in ((1, 1, "fp32"), (2, 2, "bf16"), (2, 3, "fp32")):
        for digest, expected in pool.run(ranks, _self_tested, stage, precision):
            assert digest == expected


class ByClock(Tied):
    """A model that is not a function of its inputs."""

    calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        ByClock.calls += 1
        return super().forward(ids) * (1 + ByClock.calls * 1e-3)


def _fresh_by_clock() -> nn.Module:
    return built(ByClock)


def _self_test_fails(rank: Rank) -> str:
    engine = Engine(_fresh_by_clock(), ZeroConfig(**NUMBERS, stage=2), adamw(), rank.group)
    try:
        engine.self_test(_fresh_by_clock, mean_loss)
        return "passed"
    except DivergedError as error:
        return str(error)
    finally:
        engine.close()


def test_a_self_test_names_a_parameter_that_differs(pool: Pool) -> None:
    """A model with hidden state cannot have the same bits at every stage."""
    assert all("parameter 'tokens.weight' differs" in text for text in pool.run(2, _self_test_fails))


def _traced(rank: Rank, path: str) -> dict[str, float]:
    engine = engine_of(rank, ZeroConfig(**NUMBERS, stage=3))
    engine.trace(path, steps=2)
    results = train(engine, 3)
    engine.close()
    return dict(results[-1].seconds)


def test_a_trace_has_every_phase_of_every_rank(pool: Pool, tmp_path: Path) -> None:
    """Chrome's format, a file per rank; StepResult has the same phases as numbers."""
    for seconds in pool.run(2, _traced, str(tmp_path / "trace-{rank}.json")):
        assert set(seconds) == set(PHASES) and all(value > 0 for value in seconds.values())
    for rank in range(2):
        events = json.loads((tmp_path / f"trace-{rank}.json").read_text())["traceEvents"]
        assert {event["name"] for event in events} == set(PHASES)
        assert all(event["ph"] == "X" and event["dur"] >= 0 and event["pid"] == rank for event in events)
    assert torch.is_grad_enabled()
