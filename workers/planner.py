"""What a spec would cost, before anything runs: bytes per rank, bytes on the wire, and the stage to take. Torch-free.

The numbers are the engine's own (`zero_engine.plan`); here a spec becomes a layout, and plans become what people read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from workers.estimates import Estimate, estimate_of
from workers.shapes import gpt_parameters, mlp_parameters
from workers.spec import (
    BpeTokenizer,
    CharTokenizer,
    FileTokenizer,
    GptModel,
    JobSpec,
    MlpModel,
    PythonModel,
    TextData,
    TokensData,
)
from workers.step_time import BASIS, Calibration, Device, StepSeconds, Work, predict
from zero_engine.advice import Advice, advise
from zero_engine.config import ZeroConfig
from zero_engine.layout import Layout, ParameterSpec
from zero_engine.plan import Plan

MARGIN = 0.1  # share of device memory kept free


class NeedsModel(Exception):
    """A user's model has to be built before it can be planned: `workers.model_plan` does so in a process of its own."""


class PlanModel(BaseModel):
    """Base of every result: frozen."""

    model_config = ConfigDict(frozen=True)


class StagePlan(PlanModel):
    """One ZeRO stage at one number of ranks."""

    stage: int
    fits: bool
    memory: Annotated[dict[str, int], Field(description="bytes by category of the largest rank")]
    total_bytes: Annotated[int, Field(description="their sum")]
    traffic: Annotated[dict[str, int], Field(description="bytes a step by collective/purpose, busiest rank")]
    total_traffic_bytes: Annotated[int, Field(description="their sum")]
    paper_bytes: Annotated[int, Field(description="model states per rank by the paper's formula")]
    paper_traffic_bytes: Annotated[int, Field(description="gradients and parameters per rank by the paper's formula")]
    saving: Annotated[float, Field(description="1 - total bytes / total bytes of stage 0")]
    communication_seconds: Annotated[float | None, Field(description="a step's traffic at the link's speed")] = None
    step_seconds: Annotated[StepSeconds | None, Field(description="predicted from this machine's calibration")] = None


class SpecPlan(PlanModel):
    """A spec at one number of ranks."""

    ranks: int
    micro_batches: Annotated[int, Field(description="V")]
    chunk: Annotated[int, Field(description="C")]
    parameters: int
    padded_parameters: int
    exact: Annotated[bool, Field(description="false: the user's model or vocabulary is not known before the start")]
    device_memory_bytes: int | None
    activation_bytes: Annotated[int | None, Field(description="estimate for one micro-batch, not owned by the engine")]
    activation_source: Annotated[str, Field(description="how the estimate was found, or why there is none")]
    flops: Annotated[int | None, Field(description="operations of one micro-batch, forward and backward")] = None
    step_basis: Annotated[
        str | None,
        Field(description="what predicted seconds count and on which machine; without any, how to get them"),
    ] = None
    advised_stage: int
    advice: str
    fits: bool
    idle_share: Annotated[float, Field(description="share of rank time without work since V is no multiple of ranks")]
    note: Annotated[str | None, Field(description="what the spec would need for this many ranks")] = None
    link_gbps: float | None = None
    stages: list[StagePlan]


class Where(PlanModel):
    """The machine a plan is for."""

    device: Device = "cpu"
    device_memory_bytes: int | None = None  # of one rank's device; None: not known, everything fits
    one_node: bool = True  # CPU ranks of one node move bulk data through shared memory
    link_gbps: float | None = None
    rates: Calibration | None = None  # of the machine; None: no step time is predicted
    rates_note: str | None = None  # whose rates they are, or why there are none and how to get them

    @property
    def transport(self) -> str:
        """What the engine's transport `auto` becomes there."""
        return "shared" if self.device == "cpu" and self.one_node else "group"


ANYWHERE = Where()


def plan_spec(spec: JobSpec, where: Where = ANYWHERE, ranks: int | None = None) -> SpecPlan:
    """The plan of a spec, at its own number of ranks or another. Raises NeedsModel, DataError.

    More ranks than micro-batches are planned as if the step had one for each, and the note says so.
    """
    return plan_parameters(parameters_of(spec), spec, where, ranks)


def plan_columns(spec: JobSpec, ranks: Sequence[int], where: Where = ANYWHERE) -> list[SpecPlan]:
    """A plan for each number of ranks."""
    parameters = parameters_of(spec)
    return [plan_parameters(parameters, spec, where, count) for count in ranks]


def parameters_of(spec: JobSpec) -> list[ParameterSpec]:
    """The parameters of a spec's model. Raises NeedsModel for a user's, DataError for a token file without its side."""
    match spec.model:
        case GptModel():
            return gpt_parameters(spec.model, vocabulary_of(spec))
        case MlpModel():
            from workers.data.digits import CLASSES, INPUTS

            return mlp_parameters(spec.model, INPUTS, CLASSES)
        case PythonModel():
            raise NeedsModel(f"model.entry {spec.model.entry} has to be built before it can be planned")


def vocabulary_of(spec: JobSpec) -> int:
    """Token ids there are."""
    match spec.data:
        case TextData(tokenizer=BpeTokenizer(vocab=vocabulary)):
            return vocabulary
        case TextData(tokenizer=CharTokenizer()):
            return 256
        case TextData(tokenizer=FileTokenizer(path=path)):
            from workers.data.tokenizer import vocabulary_in

            return vocabulary_in(path)
        case TokensData():
            from pathlib import Path

            from workers.data.token_file import read_side_file

            return read_side_file(Path(spec.data.path)).vocabulary
        case _:
            raise AssertionError(f"data {spec.data.kind} has no tokens")


def engine_config(spec: JobSpec, chunk: int, stage: int = 0) -> ZeroConfig:
    """The engine's settings for a spec: the one place where the two meet."""
    return ZeroConfig(
        stage=stage,
        micro_batches=spec.train.micro_batches,
        chunk=chunk,
        precision=spec.train.precision,
        gradient_clipping=spec.train.gradient_clipping,
        seed=spec.train.seed,
        activation_checkpointing=spec.zero.activation_checkpointing,
        buffers=spec.zero.buffers,
        offload="cpu" if spec.zero.offload == "optimizer" else "none",
    )


def plan_parameters(
    parameters: Sequence[ParameterSpec],
    spec: JobSpec,
    where: Where,
    ranks: int | None = None,
    estimate: Estimate | None = None,
) -> SpecPlan:
    """The plan of these parameters trained as the spec says. `estimate`: of one micro-batch; None: from shapes."""
    count = spec.resources.ranks if ranks is None else ranks
    config, note = engine_config(spec, spec.chunk), None
    if count > spec.train.micro_batches:
        config, note = (
            replace(config, micro_batches=count, chunk=1),
            f"needs global_batch {count * spec.train.micro_batch}",
        )
    estimate = estimate or estimate_of(spec, _tokens_of(spec), where.device)
    advice = advise(
        Layout.build(parameters),
        config,
        count,
        1 << 62 if where.device_memory_bytes is None else where.device_memory_bytes,
        activation_bytes=estimate.activation_bytes or 0,
        margin=MARGIN,
        transport=where.transport,
        device=where.device,
        moments=spec.train.optimizer.moments,
    )
    return _readable(advice, config, where, estimate, note)


def _tokens_of(spec: JobSpec) -> int | None:
    return vocabulary_of(spec) if isinstance(spec.model, GptModel) else None


def _readable(advice: Advice, config: ZeroConfig, where: Where, estimate: Estimate, note: str | None) -> SpecPlan:
    first, memory = advice.plans[0], where.device_memory_bytes
    room = None if memory is None else memory * (1 - MARGIN) - (estimate.activation_bytes or 0)
    micro_batches, chunk = config.resolved(first.ranks).batch_shape
    return SpecPlan(
        ranks=first.ranks,
        micro_batches=micro_batches,
        chunk=chunk,
        parameters=first.num_parameters,
        padded_parameters=first.padded_parameters,
        exact=True,
        device_memory_bytes=where.device_memory_bytes,
        activation_bytes=estimate.activation_bytes,
        activation_source=estimate.source,
        flops=estimate.flops,
        step_basis=_step_basis(where, estimate),
        advised_stage=advice.stage,
        advice=advice.reason if room is not None else _advice_without_room(advice),
        fits=advice.fits,
        idle_share=advice.plans[advice.stage].idle_share,
        note=note,
        link_gbps=where.link_gbps,
        stages=[_stage(plan, first, config, room, where, estimate) for plan in advice.plans],
    )


def _step_basis(where: Where, estimate: Estimate) -> str | None:
    if where.rates is None:
        return where.rates_note
    if estimate.flops is None:
        return f"No step times: {estimate.source}."
    return f"{BASIS} {where.rates_note or ''}".strip()


def _advice_without_room(advice: Advice) -> str:
    if advice.plans[0].ranks == 1:
        return f"Stage {advice.stage}: one rank sends nothing at any stage, and it needs the fewest bytes."
    return f"Stage {advice.stage}: it sends the least, and of the stages that send as little it needs the fewest bytes."


def _stage(
    plan: Plan, first: Plan, config: ZeroConfig, room: float | None, where: Where, estimate: Estimate
) -> StagePlan:
    link_gbps = where.link_gbps
    largest = max(plan.memory, key=lambda row: sum(row.values()))
    busiest = max(plan.traffic, key=lambda row: sum(row.values()))
    return StagePlan(
        stage=plan.stage,
        fits=room is None or plan.largest_device_memory <= room,
        memory=largest,
        total_bytes=plan.largest_memory,
        traffic=busiest,
        total_traffic_bytes=plan.largest_traffic,
        paper_bytes=round(plan.paper_bytes),
        paper_traffic_bytes=paper_traffic_bytes(plan.padded_parameters, plan.stage, plan.ranks, config.precision),
        saving=1 - plan.largest_memory / first.largest_memory,
        communication_seconds=None if link_gbps is None else plan.largest_traffic * 8 / (link_gbps * 1e9),
        step_seconds=_step_seconds(plan, config.precision, where.rates, estimate),
    )


def _step_seconds(plan: Plan, precision: str, rates: Calibration | None, estimate: Estimate) -> StepSeconds | None:
    """None without a calibration of the machine, or for a model that was not passed through."""
    if rates is None or estimate.flops is None:
        return None
    rounds, own = plan.schedule.rounds, plan.padded_parameters // plan.ranks  # elements whose sums a rank makes
    passes = sum(len(round.folds) for round in rounds) + 2 * len(rounds) - 1  # the first round has no sum to read
    work = Work(
        micro_batches=max(len(plan.schedule.work(rank)) for rank in range(plan.ranks)),
        flops=estimate.flops,
        attention_flops=estimate.attention_flops,
        activation_bytes=estimate.activation_bytes or 0,
        gradient_bytes=plan.padded_parameters * (4 if precision == "fp32" else 2),
        folded_elements=passes * own,
        normed_elements=own,
        sent_bytes=plan.largest_traffic,
        copied_bytes=plan.copied_bytes,
        updated_elements=plan.updated_elements,
        moments=plan.moments,
        ranks=plan.ranks,
    )
    return predict(work, rates)


def paper_traffic_bytes(parameters: int, stage: int, ranks: int, precision: str) -> int:
    """Bytes a rank sends a step for gradients and parameters: 2 P, at stage 3 three times P (arXiv 1910.02054, 7)."""
    volumes, item_bytes = (3 if stage == 3 else 2), (4 if precision == "fp32" else 2)
    return round(volumes * item_bytes * parameters * (ranks - 1) / ranks)
