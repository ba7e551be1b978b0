"""The plan of a spec: the engine's numbers, the paper's beside them, and the stage to take."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from server.controller.actions import Start
from server.controller.stage import resolve_stage as resolve_for_slot
from server.views import PlanView
from workers import model_builder
from workers.built_plan import at_stage, plans_of_built, predicted_stage, resolve_stage
from workers.calibrations import calibration_file, known_calibration, this_machine
from workers.contract import JobId
from workers.planner import NeedsModel, Where, engine_config, plan_columns, plan_spec
from workers.spec import JobSpec, load_spec
from workers.step_time import Calibration

GPT = (
    "name: x\nmodel: {kind: gpt, layers: 2, hidden: 64, heads: 2, context: 32}\ndata: {kind: text}\ntrain: {steps: 3}\n"
)
RATES = [name for name, field in Calibration.model_fields.items() if field.annotation is float]
USER = "name: x\nmodel: {kind: python, entry: 'm:b', path: /x}\ndata: {kind: text}\ntrain: {steps: 3}\n"


def spec(**zero: object) -> JobSpec:
    return load_spec(GPT + (f"zero: {{stage: {zero['stage']}}}\n" if zero else ""))


def test_memory_and_traffic_near_the_papers_at_one_micro_batch_per_rank() -> None:
    """Property: at V = N, fp32, stages 1 to 3 save what the paper says, and traffic is 2 or 3 times the parameters."""
    plan = plan_spec(
        load_spec(GPT.replace("steps: 3", "steps: 3, micro_batch: 4, global_batch: 16, chunk: 1")), ranks=4
    )
    assert plan.micro_batches == plan.ranks == 4
    zero, one, two, three = plan.stages
    assert zero.total_traffic_bytes == pytest.approx(zero.paper_traffic_bytes, rel=0.02)
    assert one.total_traffic_bytes == pytest.approx(one.paper_traffic_bytes, rel=0.02)
    assert two.total_traffic_bytes == pytest.approx(two.paper_traffic_bytes, rel=0.02)
    assert three.total_traffic_bytes <= 1.02 * three.paper_traffic_bytes
    assert [stage.paper_bytes for stage in plan.stages] == [
        round(plan.parameters * per) for per in (16, 8 + 8 / 4, 4 + 12 / 4, 16 / 4)
    ]
    assert zero.saving == 0 < one.saving
    assert all(sum(stage.memory.values()) == stage.total_bytes for stage in plan.stages)
    assert all(sum(stage.traffic.values()) == stage.total_traffic_bytes for stage in plan.stages)


def test_one_rank_sends_nothing() -> None:
    """Property: no traffic at any stage."""
    assert [stage.total_traffic_bytes for stage in plan_spec(spec(), ranks=1).stages] == [0, 0, 0, 0]


def test_more_ranks_than_micro_batches_are_planned_and_marked() -> None:
    """Property: such a column has V = N and names the global batch that it needs; the others carry no mark."""
    columns = plan_columns(spec(), [1, 2, 4, 8, 64])
    assert [column.note for column in columns] == [None, None, None, "needs global_batch 32", "needs global_batch 256"]
    assert [column.micro_batches for column in columns] == [4, 4, 4, 8, 64]
    assert [column.chunk for column in columns] == [2, 2, 2, 1, 1]


def test_ranks_that_do_not_divide_the_micro_batches_idle() -> None:
    """Property: four micro-batches in chunks of one on three ranks: two rounds for one and a third rounds of work."""
    plan = plan_spec(load_spec(GPT.replace("steps: 3", "steps: 3, chunk: 1")), ranks=3)
    assert plan.idle_share == pytest.approx(1 - 4 / 6)


def test_the_link_turns_bytes_into_seconds() -> None:
    """Property: bytes of the busiest rank times 8 over the speed."""
    stage = plan_spec(spec(), Where(link_gbps=10)).stages[1]
    assert stage.communication_seconds == pytest.approx(stage.total_traffic_bytes * 8 / 10e9)
    assert plan_spec(spec()).stages[1].communication_seconds is None


def test_auto_takes_the_least_traffic_that_fits_then_the_fewest_bytes() -> None:
    """Property: with room for all, no other stage sends less; with less, one that fits; else it says so."""
    roomy = plan_spec(spec(), Where(device_memory_bytes=1 << 40), ranks=4)
    sends = [stage.total_traffic_bytes for stage in roomy.stages]
    assert roomy.fits and sends[roomy.advised_stage] == min(sends)
    rivals = [stage for stage in roomy.stages if stage.total_traffic_bytes == min(sends)]
    assert roomy.stages[roomy.advised_stage].total_bytes == min(stage.total_bytes for stage in rivals)
    assert roomy.activation_bytes is not None
    least = min(roomy.stages, key=lambda stage: stage.total_bytes)
    room = (least.total_bytes + roomy.activation_bytes) / 0.9
    tight = plan_spec(spec(), Where(device_memory_bytes=int(room) + 1), ranks=4)
    assert tight.fits and tight.advised_stage == least.stage
    assert [stage.fits for stage in tight.stages] == [stage == least for stage in roomy.stages]
    hopeless = plan_spec(spec(), Where(device_memory_bytes=1000), ranks=4)
    assert not hopeless.fits and "No stage fits" in hopeless.advice


def test_resolving_a_stage_gives_the_advised_one() -> None:
    """Property: auto becomes the advice and says why; a number stays, with nothing to say."""
    where = Where(device_memory_bytes=1 << 40)
    plan, resolved = plan_spec(spec(), where), resolve_stage(spec(), where)
    assert (resolved.spec.zero.stage, resolved.plan, resolved.why) == (plan.advised_stage, plan, plan.advice)
    named = resolve_stage(spec(stage=3), where)
    assert (named.spec.zero.stage, named.why) == (3, None)
    with pytest.raises(NeedsModel):
        plan_spec(load_spec(USER))


USERS_OWN = """
from torch import nn
def build(width):
    return nn.Sequential(nn.Embedding(256, width), nn.LayerNorm(width), *(nn.Linear(width, width) for _ in range(3)))
"""


def test_a_users_model_is_planned_by_building_it_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Property: the plan equals that of an engine around the same module."""
    from workers.build import optimizer_of
    from workers.model_plan import parameters_in, user_model
    from workers.planner import engine_config
    from zero_engine import Engine

    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "users_own_plan.py").write_text(USERS_OWN)
    model = f"{{kind: python, entry: 'users_own_plan:ENTRY', path: {tmp_path}, kwargs: {{width: 24}}}}"
    wanted = load_spec(
        f"name: x\nmodel: {model}\ndata: {{kind: text}}\ntrain: {{steps: 3}}\n".replace("ENTRY", "build")
    )
    plans = asyncio.run(plans_of_built(wanted, [1, 2], Where()))
    assert [plan.ranks for plan in plans] == [1, 2]
    assert sum(each.numel for each in parameters_in(user_model(wanted), wanted)) == plans[0].parameters
    assert plans[0].activation_source.startswith("one forward and backward") and plans[0].activation_bytes
    assert plans[0].flops == 4 * 256 * 3 * (3 * 2 * 24 * 24)  # samples, context, layers, three products of each
    import users_own_plan  # type: ignore[import-not-found]

    for stage in range(4):
        engine = Engine(
            users_own_plan.build(24), engine_config(wanted, wanted.chunk, stage), optimizer_of(wanted.train.optimizer)
        )
        assert dict(engine.plan.memory[0]) == plans[0].stages[stage].memory
        engine.close()


def test_a_users_model_gets_the_stage_that_fits_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Property: what fits decides, after the model was built elsewhere, whose step is predicted where the machine was
    calibrated, also at a stage that the spec names; one that cannot be built gets stage 1.
    """
    from workers.model_plan import plans_of

    monkeypatch.setattr(sys, "path", list(sys.path))
    layers = "nn.Sequential(*(nn.Linear(width, width) for _ in range(16)))"
    code = USERS_OWN.replace("*(nn.Linear(width, width) for _ in range(3))", layers)
    (tmp_path / "users_wide.py").write_text(code)
    model = f"{{kind: python, entry: 'users_wide:build', path: {tmp_path}, kwargs: {{width: 512}}}}"
    wanted = load_spec(f"name: x\nmodel: {model}\ndata: {{kind: text}}\ntrain: {{steps: 3, chunk: 1}}\n")
    where = {"device": "cpu", "device_memory_bytes": 1 << 40}
    (roomy,) = plans_of({"spec": wanted.model_dump(mode="json"), "ranks": [wanted.resources.ranks], "where": where})
    least = min(roomy.stages, key=lambda each: each.total_bytes)
    assert least.stage == 3 != roomy.advised_stage and roomy.activation_bytes is not None
    memory = int((least.total_bytes + roomy.activation_bytes) / 0.9) + 1
    here = this_machine("cpu")
    kept = calibration_file(tmp_path, here)
    kept.parent.mkdir()
    kept.write_text(json.dumps({**asdict(here), **dict.fromkeys(RATES, 1e9), "day": "2026-11-30"}))
    known = known_calibration(tmp_path, "cpu", wanted.resources.threads_per_rank)
    small = Where(device_memory_bytes=memory, rates=known.rates, rates_note=known.note)
    tight, named = resolve_stage(wanted, small), resolve_stage(at_stage(wanted, 2), small)
    assert (named.spec.zero.stage, named.plan, named.why) == (2, None, None)
    assert tight.spec.zero.stage == 3 and tight.plan is not None and tight.why == tight.plan.advice
    assert tight.plan.stages[3].step_seconds and "Calibrated on 2026-11-30" in (tight.plan.step_basis or "")
    assert predicted_stage(named, small) == tight.plan.stages[2] and predicted_stage(named, Where()) is None
    start, made = Start(JobId("j"), "cpu"), PlanView.model_validate(tight.plan.model_dump())
    assert (resolve_for_slot(wanted, start, made).zero.stage, resolve_for_slot(wanted, start, None).zero.stage) == (
        3,
        1,
    )
    monkeypatch.setattr(model_builder, "ENTRY", "no_such_module:answer")
    unknown = resolve_stage(wanted, Where())
    assert unknown.spec.zero.stage == 1 and unknown.why is not None and "could not be planned" in unknown.why


def test_the_options_of_a_spec_reach_the_engine() -> None:
    """Property: what `zero` says is what the engine is built with, under the engine's own names."""
    zero = "{stage: 2, offload: optimizer, activation_checkpointing: full, buffers: local}"
    said = load_spec(f"name: x\nmodel: {{kind: gpt}}\ndata: {{kind: text}}\ntrain: {{steps: 3}}\nzero: {zero}\n")
    config, plain = engine_config(said, 2, 2), engine_config(spec(), 2)
    assert (config.stage, config.offload, config.activation_checkpointing, config.buffers) == (
        2,
        "cpu",
        "full",
        "local",
    )
    assert (plain.offload, plain.activation_checkpointing, plain.buffers) == ("none", "none", "refuse")


def test_a_plan_for_many_ranks_and_layers_is_quick_and_small() -> None:
    """Property: the work grows with ranks plus layers, not with their product squared (in CPU seconds)."""
    import time

    large = GPT.replace("layers: 2, hidden: 64", "layers: 96, hidden: 12288").replace("heads: 2", "heads: 96")
    before = time.process_time()
    plan = plan_spec(load_spec(large), Where(device="cuda", one_node=False), ranks=64)
    assert plan.parameters > 170e9 and time.process_time() - before < 60


def test_planning_loads_no_torch() -> None:
    """Property: the server can plan."""
    program = (
        "import sys; from workers.spec import load_spec; from workers.planner import plan_spec;"
        f"plan_spec(load_spec({GPT!r})); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "False"
