"""`plan`: what a spec would cost at every stage and number of ranks, beside the paper's formula. Nothing runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from server.cli.connection import AsJson, DataDir, data_folder
from server.cli.errors import BadInput, CommandError
from server.cli.output import Output, bytes_text, plain, seconds_text
from server.cli.spec_file import SetOption, SpecArgument, read_spec

if TYPE_CHECKING:
    from workers.planner import SpecPlan, StagePlan, Where
    from workers.spec import JobSpec

MAX_COLUMNS = 32
PLAN_SECONDS = 300.0  # for a user's model, which is built to be measured


def plan(
    spec: SpecArgument,
    ranks: Annotated[
        str | None, typer.Option(metavar="1,2,8,64", help="Numbers of ranks; default: the spec's.")
    ] = None,
    link_gbps: Annotated[float | None, typer.Option(help="Bandwidth of a rank's link, in Gbit/s.")] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="What the ranks run on.")] = "cpu",
    device_gb: Annotated[float | None, typer.Option(help="Memory of one rank's device, in GB.")] = None,
    data_dir: DataDir = None,
    changes: SetOption = None,
    as_json: AsJson = False,
) -> None:
    """Print bytes per rank and bytes sent per step for every ZeRO stage, and which stage to take; nothing runs."""
    from workers.calibrations import known_calibration
    from workers.planner import Where

    job = read_spec(spec, changes or [])
    known = known_calibration(data_folder(data_dir), device, job.resources.threads_per_rank)
    where = Where(
        device=device,
        device_memory_bytes=None if device_gb is None else round(_positive("--device-gb", device_gb) * 1e9),
        link_gbps=None if link_gbps is None else _positive("--link-gbps", link_gbps),
        rates=known.rates,
        rates_note=known.note,
    )
    counts = [job.resources.ranks] if ranks is None else _counts(ranks)
    plans = _plans(job, counts, where)
    output = Output(as_json)
    output.result([plan.model_dump(mode="json") for plan in plans], lambda: _draw(output, job, plans))


def _positive(option: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise BadInput(f"{option} {value} must be a positive number.")
    return value


def _counts(text: str) -> list[int]:
    """ "1,2,8" as numbers, in the order typed, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= 65536 for part in parts):
        raise BadInput(f"--ranks {text!r}: write numbers from 1 to 65536 with commas between, as in 1,2,8,64")
    counts = list(dict.fromkeys(map(int, parts)))
    if len(counts) > MAX_COLUMNS:
        raise BadInput(f"--ranks names {len(counts)} numbers; at most {MAX_COLUMNS} at once")
    return counts


def _plans(spec: JobSpec, counts: Sequence[int], where: Where) -> list[SpecPlan]:
    from workers.planner import NeedsModel, plan_columns

    try:
        return plan_columns(spec, counts, where)
    except NeedsModel:
        return _plans_of_built_model(spec, counts, where)
    except OSError as error:
        raise BadInput(f"The data of this spec cannot be looked at: {error}") from error


def _plans_of_built_model(spec: JobSpec, counts: Sequence[int], where: Where) -> list[SpecPlan]:
    """A user's model is built, on the meta device, in a process of its own: their code never runs in this one."""
    import asyncio

    from workers.built_plan import plans_of_built
    from workers.model_builder import NotBuilt

    try:
        return asyncio.run(plans_of_built(spec, counts, where, seconds=PLAN_SECONDS))
    except NotBuilt as error:
        raise CommandError(f"The model could not be built:\n{error}") from error


def _draw(output: Output, spec: JobSpec, plans: Sequence[SpecPlan]) -> None:
    first = plans[0]
    output.say(plain(f"{spec.name}: {first.parameters:,} parameters, {spec.train.precision}."))
    time = "" if first.link_gbps is None else f", and how long that takes at {first.link_gbps:g} Gbit/s"
    output.say(f"Bytes a rank holds and sends per step, each beside the paper's formula{time}.")
    output.say("Marked *: the stage to take; (!): does not fit the device.")
    headings = [
        ">Ranks",
        ">Stage",
        ">Holds",
        ">Paper",
        ">Saving",
        ">Sends",
        ">Paper",
        *([">Takes"] if time else []),
        *([">Step"] if first.stages[0].step_seconds else []),
        "",
    ]
    output.table(headings, (_row(column, stage) for column in plans for stage in column.stages))
    if len(plans) == 1:
        _draw_categories(output, first)
    held = "not known" if first.activation_bytes is None else bytes_text(first.activation_bytes)
    output.say(f"Activations of a micro-batch, beside what a rank holds: {held} ({first.activation_source}).")
    output.say(("Step: " if first.stages[0].step_seconds else "") + (first.step_basis or ""))
    for column in plans:
        output.say(_advice(column))


def _row(column: SpecPlan, stage: StagePlan) -> list[str]:
    mark = "* " if stage.stage == column.advised_stage else ""
    return [
        str(column.ranks) if stage.stage == 0 else "",
        f"{mark}{stage.stage}",
        bytes_text(stage.total_bytes) + ("" if stage.fits else " (!)"),
        bytes_text(stage.paper_bytes),
        f"{100 * stage.saving:.1f} %",
        bytes_text(stage.total_traffic_bytes),
        bytes_text(stage.paper_traffic_bytes),
        *([] if stage.communication_seconds is None else [seconds_text(stage.communication_seconds)]),
        *([] if stage.step_seconds is None else [seconds_text(stage.step_seconds.total)]),
    ]


def _draw_categories(output: Output, plan: SpecPlan) -> None:
    categories = [name for name in plan.stages[0].memory if any(stage.memory.get(name) for stage in plan.stages)]
    output.table(
        ["Bytes of the largest rank", *(f">Stage {stage.stage}" for stage in plan.stages)],
        ([name, *(bytes_text(stage.memory.get(name, 0)) for stage in plan.stages)] for name in categories),
    )


def _advice(plan: SpecPlan) -> str:
    unit = "rank" if plan.ranks == 1 else "ranks"
    idle = f"; {100 * plan.idle_share:.0f} % of rank time idle" if plan.idle_share else ""
    note = f"; {plan.note}" if plan.note else ""
    return f"{plan.ranks} {unit}, V = {plan.micro_batches}, C = {plan.chunk}{idle}{note}. {plan.advice}"
