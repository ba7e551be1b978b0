"""How long a step should take: operations as kernels count them, rates of a machine, and their sum."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest
import torch

from tests.unit.test_activation_bytes import POLICIES, gpt, loss_of, module_of
from tests.unit.test_cli_commands import shardyard
from workers import calibrations
from workers.calibrate import write
from workers.calibrations import calibration_file, known_calibration, machine_of, this_machine
from workers.models.mlp import Mlp
from workers.planner import Where, plan_spec
from workers.spec import load_spec
from workers.step_time import (
    Calibration,
    Work,
    gpt_attention_flops,
    gpt_flops,
    mlp_flops,
    predict,
    update_bytes,
)
from zero_engine import ZeroConfig
from zero_engine.dry_run import Empty, dry_run

RATES = Calibration(
    device="cpu", hardware="a machine", torch="2", cores=2, threads=1, matmul_flops=1e9, attention_flops=5e8,
    activation_bytes=5e7, memory_bytes=1e8, norm_elements=1e7, exchange_bytes=1e7,
)  # fmt: skip
SPEC = "name: x\nmodel: {kind: gpt, layers: 2, hidden: 64, heads: 2, context: 32}\ndata: {kind: text}\n"


@pytest.mark.parametrize("policy", POLICIES)
def test_operations_from_shapes_are_those_of_the_pass(policy: str) -> None:
    """Property: products, attention and recomputation of a GPT and an MLP, counted alike, to the last one."""
    for context, vocabulary, samples, layers, width in ((32, 300, 4, 3, 64), (16, 512, 2, 2, 32)):
        shape = gpt(context, vocabulary, layers, 0.0, width)
        with torch.device("meta"):
            module = module_of(shape, vocabulary)
        batch = [Empty((samples, context), torch.int64)] * 2
        found = dry_run(module, loss_of, batch, ZeroConfig(activation_checkpointing=policy))
        assert gpt_flops(shape, vocabulary, samples, policy) == found.flops
        assert gpt_attention_flops(shape, samples, policy) == found.attention_flops > 0
    with torch.device("meta"):
        mlp = Mlp(inputs=64, hidden=(32, 16), outputs=10)
    found = dry_run(mlp, loss_of, [Empty((8, 64), torch.float32), Empty((8,), torch.int64)], ZeroConfig())
    assert mlp_flops((64, 32, 16, 10), 8) == found.flops


def test_a_step_is_compute_and_exchange_and_update() -> None:
    """Property: each part is its amount over its rate; ranks that share cores take turns."""
    work = Work(
        micro_batches=2, flops=10**9, attention_flops=10**8, activation_bytes=10**7, gradient_bytes=2 * 10**7,
        folded_elements=10**6, normed_elements=10**6, sent_bytes=10**7, copied_bytes=10**7, updated_elements=10**6,
        moments=2, ranks=2,
    )  # fmt: skip
    found = predict(work, RATES)
    assert found.compute == pytest.approx(2 * (0.9 + 0.2 + 0.8 + 0.6)) and found.exchange == pytest.approx(2)
    assert found.update == pytest.approx((update_bytes(10**6, 2) + 4 * 10**6) / 1e8 + 0.1) == pytest.approx(0.42)
    assert found.total == pytest.approx(found.compute + found.exchange + found.update)
    crowded = predict(work.model_copy(update={"ranks": 6}), RATES)
    assert crowded.total == pytest.approx(3 * found.total)


def test_a_plan_predicts_a_step_where_the_machine_was_calibrated() -> None:
    """Property: with rates every stage has its seconds and the plan says what they count; without, neither."""
    spec = load_spec(SPEC + "train: {steps: 3}\n")
    plan = plan_spec(spec, Where(rates=RATES, rates_note="On a machine."), ranks=2)
    assert plan.step_basis is not None and plan.step_basis.endswith("On a machine.") and plan.flops
    seconds = [stage.step_seconds for stage in plan.stages]
    assert all(each is not None and each.total > 0 for each in seconds)
    zero, one, two, three = (each for each in seconds if each is not None)
    assert zero.compute == three.compute and zero.update > one.update  # stage 0 updates everything on every rank
    assert one.exchange <= two.exchange <= three.exchange
    bare = plan_spec(spec, ranks=2)
    assert bare.step_basis is None and [stage.step_seconds for stage in bare.stages] == [None] * 4


def test_a_calibration_is_measured_kept_and_read_again(tmp_path: Path) -> None:
    """Property: positive rates, for this machine, build and threads alone; `plan` shows a step, or how to get one."""
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC + "train: {steps: 3}\n")
    before = json.loads(shardyard(None, "plan", str(spec), "--data-dir", str(tmp_path)).stdout)[0]
    said = shardyard(None, "calibrate", "--device", "cpu", "--seconds", "0.01", "--data-dir", str(tmp_path))
    kept, file = known_calibration(tmp_path, "cpu").rates, calibration_file(tmp_path, this_machine("cpu"))
    assert said.returncode == 0 and kept is not None and machine_of(kept) == this_machine("cpu")
    assert json.loads(said.stdout)["file"] == str(file)
    assert min(value for value in kept.model_dump().values() if isinstance(value, float)) > 1e6
    after = json.loads(shardyard(None, "plan", str(spec), "--data-dir", str(tmp_path)).stdout)[0]
    assert "run `shardyard calibrate --device cpu`" in before["step_basis"] and not before["stages"][0]["step_seconds"]
    assert (
        f"Calibrated on {date.today()}, {kept.hardware}" in after["step_basis"] and after["stages"][0]["step_seconds"]
    )
    threads = known_calibration(tmp_path, "cpu", threads=2)
    assert threads.rates is None and "--threads 2" in threads.note
    moved = kept.model_copy(update={"hardware": "a slower one", "torch": "2.9"})
    file.write_text(moved.model_dump_json())
    stale = known_calibration(tmp_path, "cpu")
    assert stale.rates is None and "is of a slower one" in stale.note and "torch 2.9" in stale.note
    file.write_text("{}")
    assert known_calibration(tmp_path, "cpu").rates is None


def test_a_server_without_gpus_takes_what_a_node_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Property: a GPU's file copied to it counts for its own torch build; without one the plan says where to run it."""
    monkeypatch.setattr(calibrations, "_gpu", lambda: "")
    here = this_machine("cuda")
    assert "on a node with this kind of GPU" in known_calibration(tmp_path, "cuda").note
    node = RATES.model_copy(update={"device": "cuda", "hardware": "NVIDIA H200", "torch": here.torch, "cores": 16})
    write(node, tmp_path)
    assert known_calibration(tmp_path, "cuda").rates == node
    monkeypatch.setattr(calibrations, "_gpu", lambda: "NVIDIA T4")
    assert known_calibration(tmp_path, "cuda").rates is None
