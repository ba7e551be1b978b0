"""The engine tests itself on the user's model, and shows where time goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.engine_cases import Tied, adamw, built, engine_of, mean_loss, reference_of, tied, train
from tests.distributed.rank_pool import Pool, Rank
from zero_engine import Engine, ZeroConfig
from zero_engine.errors import DivergedError
from zero_engine.memory_meter import HostMeter
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
    engine = engine_of(rank, ZeroConfig(**NUMBERS, stage=3, transport="group"))
    engine.trace(path, steps=2)
    results = train(engine, 3)
    seconds = dict(results[-1].seconds)
    assert results[-1].hidden_seconds == sum(engine.ledger().hidden.values()) >= 0
    engine.close()
    return seconds


def test_a_trace_has_every_phase_and_every_message_of_every_rank(pool: Pool, tmp_path: Path) -> None:
    """Chrome's format, a file per rank; messages begin and end; StepResult has the same phases as numbers."""
    for seconds in pool.run(2, _traced, str(tmp_path / "trace-{rank}.json")):
        assert set(seconds) == set(PHASES) and all(value > 0 for value in seconds.values())
    for rank in range(2):
        events = json.loads((tmp_path / f"trace-{rank}.json").read_text())["traceEvents"]
        assert {event["name"] for event in events if event["ph"] == "X"} == set(PHASES)
        assert all(event["dur"] >= 0 and event["pid"] == rank for event in events if event["ph"] == "X")
        begun = {event["id"]: event for event in events if event["ph"] == "b"}
        ended = {event["id"]: event for event in events if event["ph"] == "e"}
        assert {event["name"] for event in begun.values()} >= {"exchange/gradients", "gather/parameters", "gather/norm"}
        assert begun.keys() == ended.keys() and all(ended[id]["ts"] >= begun[id]["ts"] for id in begun)
        assert all(event["args"]["hidden_us"] >= 0 for event in begun.values())


def _watched(rank: Rank, stage: int) -> Any:
    config = ZeroConfig(**NUMBERS, stage=stage)
    engine = engine_of(rank, config, width=128)
    memory = []
    for step in range(4):
        if step in (1, 3):
            engine.watch_memory()
        memory.append(train(engine, 1)[0].memory)
    planned, digest = engine.plan.memory[rank.rank], engine.digest()
    engine.close()
    return memory, planned, digest


def test_memory_by_phase_is_the_plan_beside_what_the_step_allocates(pool: Pool) -> None:
    """Only in watched steps. Engine-owned bytes equal the plan in every phase; activations rise in forward, peak by
    backward and are gone in the update; the bits are those of a step that nobody watched."""
    reference = reference_of(ZeroConfig(**NUMBERS), width=128)
    train(reference, 4)
    for stage in range(4):
        for memory, planned, digest in pool.run(2, _watched, stage):
            assert digest == reference.digest() and memory[0] == memory[2] == {} and memory[1] == memory[3]
            assert set(memory[1]) == set(PHASES)
            activations = {phase: row.pop("activations") for phase, row in memory[1].items()}
            assert all(row == planned for row in memory[1].values())
            assert activations["backward"] >= activations["forward"] > 100_000 > activations["update"], activations


def test_what_is_watched_is_what_autograd_keeps() -> None:
    """At the end of forward the meter holds the saved tensors of a known model, and nothing after they are freed."""
    meter = HostMeter()
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(3)]
    x = torch.randn(32, 64)
    meter.start()
    for weight in weights:
        x = torch.tanh(x @ weight)
    held = meter.peak()
    x.sum().backward()  # type: ignore[no-untyped-call]
    x = torch.empty(0)
    meter.peak()
    left = meter.peak()
    meter.stop()
    size = 32 * 64 * 4
    assert 3 * size <= held <= 5 * size  # a tanh keeps its result; a product and its tanh stand side by side once
    assert left == 3 * 64 * 64 * 4 and all(weight.grad is not None for weight in weights)
