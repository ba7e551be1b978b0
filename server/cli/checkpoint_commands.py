"""Commands on checkpoints: list them, take the weights out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from server.cli.client import Json
from server.cli.connection import Session
from server.cli.errors import BadInput, CommandError
from server.cli.jobs_commands import JobArgument
from server.cli.output import age_text, bytes_text, number_text, short_id

USABLE = ("complete", "verified")


def checkpoints(session: Session, job: JobArgument) -> None:
    """List the checkpoints of a job."""
    items = session.checkpoints(session.job(job))
    session.output.result(items, lambda: _draw(session, items))


def _draw(session: Session, items: list[Json]) -> None:
    if not items:
        session.output.say("No checkpoint yet.")
        return
    session.output.table(
        ("Id", ">Step", ">Attempt", "Status", "N x stage", ">Size", ">Eval", "Digest", ">Age"),
        (
            (
                short_id(item["id"]),
                str(item["step"]),
                str(item["attempt"]),
                item["status"] + (" pinned" if item["pinned"] else ""),
                f"{item['ranks']} x {item['stage']}",
                bytes_text(item["bytes"]),
                number_text(item["eval_loss"]),
                item["digest"],
                age_text(item["created_at"]),
            )
            for item in items
        ),
    )


def export(
    session: Session,
    job: JobArgument,
    target: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to; default: NAME-step.safetensors.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Of the checkpoint; default: the newest.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="Id of the checkpoint, or the end of one.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Write the weights of a checkpoint as one safetensors file with canonical names."""
    job_id = session.job(job)
    chosen = session.checkpoint(job_id, checkpoint) if checkpoint else _newest(session.checkpoints(job_id), step)
    target = target or Path(f"{short_id(job_id)}-step{chosen['step']}.safetensors")
    if target.exists() and not force:
        raise BadInput(f"{target} exists; give another name with -o, or --force.")
    count = _download(session, f"/v1/checkpoints/{chosen['id']}/export", target)
    result = {"checkpoint": chosen["id"], "step": chosen["step"], "file": str(target), "bytes": count}
    session.output.result(
        result, lambda: session.output.say(f"Wrote {target}, {bytes_text(count)}, step {chosen['step']}.")
    )


def _newest(items: list[Json], step: int | None) -> Json:
    """The newest usable checkpoint, of one step if that is named."""
    usable = [item for item in items if item["status"] in USABLE]
    found = [item for item in usable if step is None or item["step"] == step]
    if not found:
        steps = ", ".join(str(item["step"]) for item in usable)
        raise CommandError(f"There is no such checkpoint; usable ones stand at step: {steps or 'none'}.")
    return max(found, key=lambda item: (item["step"], item["attempt"]))


def _download(session: Session, path: str, target: Path) -> int:
    part = target.with_name(target.name + ".part")
    count = 0
    try:
        with session.client.bytes_of(path) as (length, pieces), part.open("wb") as file:
            for piece in pieces:
                count += file.write(piece)
        if length is not None and count != length:
            raise CommandError(f"The download ended after {count} of {length} bytes; try again.")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return count
