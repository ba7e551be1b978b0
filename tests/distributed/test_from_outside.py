"""What a user's program does around the engine: load weights, checkpoint activations, launch a wrong size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.engine_cases import adamw, built, engine_of, reference_of, tied, train
from tests.distributed.rank_pool import Pool, Rank
from tests.distributed.test_any_model import Body, plain
from tests.waiting import PATIENCE_SECONDS
from zero_engine import Engine, ZeroConfig
from zero_engine.errors import EngineError, UsageError

NUMBERS: dict[str, Any] = {"micro_batches": 4, "chunk": 2, "gradient_clipping": 0.5}


def _other_weights() -> dict[str, Tensor]:
    torch.manual_seed(7)
    return {name: value.detach().clone() for name, value in tied().state_dict().items()}


def _loaded(rank: Rank, stage: int, precision: str, where: str) -> str:
    """Weights of another model: given to the model before the engine is built, or to the engine after two steps."""
    model = built(tied)
    if where == "before":
        model.load_state_dict(_other_weights())
    engine = Engine(model, ZeroConfig(stage, **NUMBERS, precision=precision), adamw(), rank.group)
    if where == "after":
        engine.load_full_state_dict(_other_weights())
    train(engine, 2)
    digest = engine.digest()
    engine.close()
    return digest


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_loaded_weights_are_what_the_next_step_starts_from(pool: Pool, precision: str) -> None:
    """No older master comes back at the first step, whether the weights were loaded before or after the build."""
    reference = reference_of(ZeroConfig(**NUMBERS, precision=precision), _with_other_weights)
    train(reference, 2)
    for stage in range(4):
        for where in ("before", "after"):
            assert set(pool.run(2, _loaded, stage, precision, where)) == {reference.digest()}, (stage, where)


def _with_other_weights() -> nn.Module:
    model = tied()
    model.load_state_dict(_other_weights())
    return model


def _written_behind(rank: Rank, stage: int, precision: str) -> str:
    engine = engine_of(rank, ZeroConfig(stage, **NUMBERS, precision=precision))
    train(engine, 1)
    try:
        engine.module.load_state_dict({"norm.weight": torch.zeros(24)}, strict=False)
        train(engine, 1)
        return "trained"
    except EngineError as error:
        return str(error)
    finally:
        engine.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_written_behind_the_engine_are_refused_by_name(pool: Pool, precision: str) -> None:
    """At every stage alike, since the master or the shard elsewhere would silently win; the way out is named."""
    for stage in range(4):
        for text in pool.run(2, _written_behind, stage, precision):
            assert "norm.weight" in text and "load_full_state_dict" in text, text


def _replace_module(model: Any) -> None:
    model.blocks[1].up = nn.Linear(24, 73)


def _replace_parameter(model: Any) -> None:
    model.load_state_dict({"norm.weight": torch.zeros(24)}, strict=False, assign=True)


def _add_module(model: Any) -> None:
    model.adapter = nn.Linear(2, 2)


def _give_data(model: Any) -> None:
    model.norm.weight.data = torch.zeros(24)


def _replace_activation(model: Any) -> None:
    model.blocks[1].dropout = nn.Identity()


def _changed_behind(rank: Rank, stage: int, change: Any) -> str:
    engine = engine_of(rank, ZeroConfig(stage, **NUMBERS))
    train(engine, 1)
    change(engine.module)
    try:
        train(engine, 2)
        return "trained"
    except EngineError as error:
        return str(error)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_replace_module, "'blocks.1.up.weight' was replaced"),
        (_replace_parameter, "'norm.weight' was replaced"),
        (_add_module, "'adapter.weight' was added"),
        (_give_data, "'norm.weight' was given other memory"),
        (_replace_activation, "trained"),
    ],
)
def test_a_model_changed_behind_the_engine_is_refused_by_name(pool: Pool, change: Any, said: str) -> None:
    """What was replaced would not train, in silence; a module without parameters may be."""
    for stage in (0, 3):
        assert all(said in text for text in pool.run(2, _changed_behind, stage, change))


class TwiceWithFrozenNorm(Body):
    """Blocks that run twice, each with a frozen norm."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm.requires_grad_(False)

    def body(self, x: Tensor, ids: Tensor) -> Tensor:
        for number in (0, 1, 1, 2, 0, 3):
            x = self.blocks[number](x)
        return x


def _checkpointed(rank: Rank, stage: int, policy: str) -> str:
    config = ZeroConfig(stage, **NUMBERS, activation_checkpointing=policy)
    engine = Engine(built(TwiceWithFrozenNorm), config, adamw(), rank.group)
    train(engine, 2, plain)
    digest = engine.digest()
    engine.close()
    return digest


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_checkpointed_block_may_run_twice_with_a_frozen_norm(pool: Pool, policy: str) -> None:
    """Recomputed twice in one backward, its weights are there both times: the plain loop's digest."""
    reference = reference_of(ZeroConfig(**NUMBERS), TwiceWithFrozenNorm)
    train(reference, 2, plain)
    for ranks, stage in ((1, 3), (2, 0), (2, 2), (3, 3)):
        assert set(pool.run(ranks, _checkpointed, stage, policy)) == {reference.digest()}, (ranks, stage)


class Reentrant(Body):
    """The user's own checkpointing, of the kind that runs a backward inside the backward."""

    def body(self, x: Tensor, ids: Tensor) -> Tensor:
        for number in (0, 1, 1, 2):
            x = checkpoint(self.blocks[number], x, use_reentrant=True)
        return x


def _reentrant(rank: Rank, stage: int) -> str:
    engine = Engine(built(Reentrant), ZeroConfig(stage, **NUMBERS), adamw(), rank.group)
    try:
        train(engine, 1, plain)
        return engine.digest()
    except UsageError as error:
        return str(error)
    finally:
        engine.close("use_reentrant")


def test_reentrant_checkpointing_is_exact_or_refused_with_the_way_out(pool: Pool) -> None:
    """Never a silently wrong sum: the plain loop's digest, or an error that says use_reentrant=False."""
    reference = reference_of(ZeroConfig(**NUMBERS), Reentrant)
    train(reference, 1, plain)
    for stage in range(4):
        for text in pool.run(1, _reentrant, stage):
            assert text == reference.digest() or "use_reentrant=False" in text, (stage, text)


def test_a_launcher_that_promised_more_ranks_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """WORLD_SIZE says 2 and nobody has met: an error, not a run of one rank."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="init_process_group"):
        Engine(built(tied), ZeroConfig(micro_batches=2), adamw())


PROGRAM = """
import sys
import torch, torch.distributed as dist
from torch import nn
from zero_engine import Engine, ZeroConfig
rank, store, transport, where = int(sys.argv[1]), *sys.argv[2:]
torch.manual_seed(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = nn.Linear(4, 4)
if (rank, where) == (1, "building"):
    model.weight.grad = torch.ones(4, 4)
engine = Engine(model, ZeroConfig(stage=1, micro_batches=2, transport=transport))
for step in range(3):
    for index in engine.micro_batches():
        if (step, rank, where) == (1, 1, "inside"):
            raise ValueError("a fault of its own")
        engine.backward(engine.module(torch.ones(1, 4)).sum())
    engine.step()
    if (step, rank) == (1, 1):
        raise ValueError("a fault of its own")
"""


@pytest.mark.parametrize(
    ("transport", "where", "error"),
    [
        ("shared", "inside", "ValueError: a fault of its own"),
        ("group", "between", "ValueError: a fault of its own"),
        ("shared", "building", "UsageError: parameter 'weight' has a gradient"),
    ],
)
def test_an_exception_that_ends_a_program_is_what_the_others_hear(
    root: Path, tmp_path: Path, transport: str, where: str, error: str
) -> None:
    """Without any `close` in the program."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store"), transport, where],
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    heard, failed = (rank.communicate(timeout=PATIENCE_SECONDS)[1] for rank in ranks)
    assert error in failed.splitlines()[-1], failed
    assert f"PeerError: rank 1 failed: {error}" in heard, heard
