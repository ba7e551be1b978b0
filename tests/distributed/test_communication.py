"""What travels, when and where: late messages, options that show on the wire, devices, current weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zero_engine.engine
from tests.distributed.delayed_comm import delays
from tests.distributed.engine_cases import adamw, built, engine_of, mean_loss, reference_of, train
from tests.distributed.rank_pool import Pool, Rank
from tests.distributed.test_any_model import CalledTwice, OtherOrder, Sometimes, plain
from zero_engine import Engine, ZeroConfig
from zero_engine.arenas import Arenas

NUMBERS: dict[str, Any] = {"micro_batches": 4, "chunk": 2, "gradient_clipping": 0.5}


def _late(rank: Rank, config: ZeroConfig, seed: int) -> tuple[str, bool]:
    Arenas.fresh_byte = 0xFF
    try:
        with delays(seed) as comms:
            engine = engine_of(rank, config)
            train(engine, 2)
            digest = engine.digest()
            engine.close()
    finally:
        Arenas.fresh_byte = 0
    return digest, comms[0].late > 10


@pytest.mark.parametrize("transport", ["group", "shared"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_late_communication_changes_no_bit(pool: Pool, stage: int, transport: str) -> None:
    """Every operation comes late by another seeded amount on each rank; a buffer is never read or reused too early."""
    reference = reference_of(ZeroConfig(**NUMBERS))
    train(reference, 2)
    for ranks, seed in ((2, 1), (3, 2)):
        config = ZeroConfig(stage, **NUMBERS, transport=transport, bucket_bytes=4096)
        assert set(pool.run(ranks, _late, config, seed)) == {(reference.digest(), True)}


def _last_reads_late(rank: Rank, config: ZeroConfig) -> str:
    with delays(1, last_alone=True):
        engine = engine_of(rank, config)
        train(engine, 2)
        digest = engine.digest()
        engine.close()
    return digest


@pytest.mark.parametrize("transport", ["group", "shared"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_late_reader_finds_the_pieces_of_the_last_round(pool: Pool, stage: int, transport: str) -> None:
    """They are one micro-batch in half precision, and half as wide as the totals that come to stand in their place."""
    numbers = NUMBERS | {"micro_batches": 5, "precision": "bf16"}
    reference = reference_of(ZeroConfig(**numbers))
    train(reference, 2)
    config = ZeroConfig(stage, **numbers, transport=transport)
    assert set(pool.run(2, _last_reads_late, config)) == {reference.digest()}


def _late_order(rank: Rank, model: type[nn.Module], seed: int) -> str:
    with delays(seed):
        engine = Engine(built(model), ZeroConfig(3, **NUMBERS), adamw(), rank.group)
        train(engine, 3, plain)
        digest = engine.digest()
        engine.close()
    return digest


@pytest.mark.parametrize("model", [OtherOrder, CalledTwice, Sometimes], ids=lambda model: model.__name__)
def test_modules_in_another_order_use_this_steps_weights(pool: Pool, model: type[nn.Module]) -> None:
    """Stage 3, three steps, late gathers: a unit that comes early, twice or never has current weights."""
    reference = reference_of(ZeroConfig(**NUMBERS), model)
    train(reference, 3, plain)
    assert set(pool.run(2, _late_order, model, 5)) == {reference.digest()}


def _wire(rank: Rank, config: ZeroConfig) -> tuple[str, dict[str, int]]:
    engine = engine_of(rank, config)
    train(engine, 1)
    seen = engine.comm.name, engine.ledger().bytes
    engine.close()
    return seen


def test_what_the_config_says_shows_on_the_wire(pool: Pool) -> None:
    """The transport asked for is the one used; bf16 halves gradients and weights, on both legs; fp32 sums do not."""
    whole, half = (pool.run(2, _wire, ZeroConfig(1, 2, 1, each))[0][1] for each in ("fp32", "bf16"))
    for leg in ("exchange/gradients", "gather/parameters"):
        assert 2 * half[leg] == whole[leg]
    sums = pool.run(2, _wire, ZeroConfig(1, 4, 2, "bf16"))[0][1]
    assert sums["exchange/gradients"] == whole["exchange/gradients"]
    for transport in ("group", "shared"):
        names = {name for name, _ in pool.run(2, _wire, ZeroConfig(1, 2, 1, transport=transport))}
        assert names == {transport}


def _devices(rank: Rank, stage: int) -> set[str]:
    """Where the tensors stand that a step hands to the transport, with the update offloaded."""
    seen = set[str]()
    connect = zero_engine.engine.comm_between

    def watched(*args: Any) -> Any:
        comm = connect(*args)
        gather, publish = comm.gather, comm.publish

        def look_gather(buffer: Any, request: Any, target: Any, purpose: str) -> None:
            seen.update((str(buffer.local.device), str(target.device)))
            gather(buffer, request, target, purpose)

        def look_publish(buffer: Any, label: str) -> None:
            seen.add(str(buffer.local.device))
            publish(buffer, label)

        comm.gather, comm.publish = look_gather, look_publish
        return comm

    with patch.object(zero_engine.engine, "comm_between", watched):
        engine = engine_of(rank, ZeroConfig(stage, **NUMBERS, offload="cpu"))
        train(engine, 1)
        seen.add(str(engine.device))
        engine.close()
    return seen


def test_all_that_travels_stands_on_the_engines_device(pool: Pool) -> None:
    """Norms, flags and losses too, with clipping and offload: a device-only backend is never given a host scalar."""
    for stage in range(4):
        assert pool.run(2, _devices, stage) == [{"cpu"}] * 2


def _stale(engine: Engine) -> list[str]:
    """Parameters whose compute weights are not the cast of their master weights."""
    wrong = []
    masters = engine.full_state_dict()
    for name, parameter in engine.module.named_parameters():
        if type(parameter) is nn.Parameter and not torch.equal(parameter, masters[name].to(parameter.dtype)):
            wrong.append(name)
    return wrong


def _refreshed(rank: Rank, stage: int, folder: str) -> list[list[str]]:
    config = ZeroConfig(stage, **NUMBERS, precision="bf16")
    engine = engine_of(rank, config)
    found = []
    for _ in range(2):
        train(engine, 1)
        found.append(_stale(engine))
    engine.save(folder)
    engine.close()
    other = engine_of(rank, config)
    other.restore(folder)
    found.append(_stale(other))
    with torch.no_grad():
        mean_loss(other.module, 0, 0)  # at stage 3 every unit is gathered on the way
    other.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_compute_weights_are_the_cast_of_the_masters(pool: Pool, stage: int, memory_path: Path) -> None:
    """After every step and after a load, bf16 weights are the master weights rounded."""
    assert pool.run(2, _refreshed, stage, str(memory_path)) == [[[], [], []]] * 2
