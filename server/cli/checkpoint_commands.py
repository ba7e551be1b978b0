"""Commands on checkpoints: list them, look through the store, take the weights out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from server.cli.client import Json
from server.cli.connection import Session
from server.cli.download import download_file, download_folder
from server.cli.errors import BadInput, CommandError, ServerProblem
from server.cli.output import age_text, bytes_text, number_text, short_id

USABLE = ("complete", "verified")
FOLDER_OF = {"safetensors": "folder", "transformers": "transformers"}  # what the API calls the tar of each
ID_CHARACTERS = 36


CheckpointArgument = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help="JOB for its newest usable one, JOB@STEP, JOB@END of its id, or its id."),
]
Format = Literal["safetensors", "transformers"]
Dtype = Literal["fp32", "bf16", "fp16"]


def checkpoints(
    session: Session,
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Id, end of an id, name, or `latest`.")] = None,
    removed: Annotated[bool, typer.Option("--removed", help="Those that retention took, too.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many, the newest.")] = 50,
    orphans: Annotated[
        bool, typer.Option("--orphans", help="Instead: what lies in the whole store that nothing refers to.")
    ] = False,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Instead: take in jobs that only the store knows; they rest until resumed.")
    ] = False,
) -> None:
    """List the checkpoints of a job, or look through the whole store."""
    if adopt:
        taken = session.client.post("/v1/store/adopt")
        session.output.result(taken, lambda: session.output.say(f"Took in {len(taken['jobs'])} jobs."))
        return
    if orphans:
        found = session.client.get("/v1/store/orphans")
        session.output.result(found, lambda: _draw_orphans(session, found))
        return
    if job is None:
        raise BadInput("Say which job, or --orphans for the whole store.")
    path = f"/v1/jobs/{session.job(job)}/checkpoints"
    pages = list(session.client.pages(path, limit, removed=removed))
    items = [item for page in pages for item in page["items"]]
    session.output.result(items, lambda: _draw(session, items, pages[0]["counts"], removed=removed))


def _draw_orphans(session: Session, found: Json) -> None:
    if not found["items"]:
        session.output.say(f"Nothing in {found['store']} is without an owner ({found['jobs']} jobs looked through).")
        return
    session.output.table(
        ("Kind", "Job", "Place", ">Size", "~Meaning"),
        (
            (item["kind"], item["job_id"], item["place"], bytes_text(item["bytes"]), item["meaning"])
            for item in found["items"]
        ),
    )


def named_checkpoint(session: Session, named: str, statuses: tuple[str, ...] = USABLE) -> Json:
    """The checkpoint named by its id, its job, JOB@STEP or JOB@END of its id. Raises CommandError, BadInput."""
    if len(named) == ID_CHARACTERS:
        try:
            return dict(session.client.get(f"/v1/checkpoints/{named}"))
        except ServerProblem as problem:
            if problem.status != 404:
                raise
    job, at, place = named.rpartition("@")
    job_id = session.job(job if at else named)
    known = [item for item in session.checkpoints(job_id) if item["status"] in statuses]
    found = [item for item in known if not at or str(item["step"]) == place]
    if found:
        return max(found, key=lambda item: (item["step"], item["attempt"]))
    if at and not place.isdecimal():
        return session.checkpoint(job_id, place)
    steps = ", ".join(str(item["step"]) for item in known)
    raise CommandError(f"The job has no such checkpoint; usable ones stand at step: {steps or 'none'}.")


def _draw(session: Session, items: list[Json], counts: dict[str, int], *, removed: bool) -> None:
    taken = counts.get("deleted", 0)
    older = sum(counts.values()) - len(items) - (0 if removed else taken)
    if items:
        _draw_table(session, items)
    else:
        session.output.say("No checkpoint is left." if taken else "No checkpoint yet.")
    if older > 0:
        session.output.say(f"{older} older ones are not shown; --limit says how many are.")
    if taken and not removed:
        session.output.say(f"{taken} were removed by retention; --removed shows them.")


def _draw_table(session: Session, items: list[Json]) -> None:
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
    checkpoint: CheckpointArgument,
    target: Annotated[
        Path | None, typer.Option("--output", "-o", help="A folder, or one file NAME.safetensors. Default: JOB-stepN.")
    ] = None,
    kind: Annotated[
        Format, typer.Option("--format", help="Our canonical names, or what `transformers` loads (model gpt).")
    ] = "safetensors",
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="Of the weights; default: as stored.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """Write the weights of a checkpoint with config.json and the tokenizer, or alone as one safetensors file."""
    chosen = named_checkpoint(session, checkpoint)
    target = target or Path(f"{short_id(chosen['job_id'])}-step{chosen['step']}")
    alone = target.suffix == ".safetensors"
    if alone and kind == "transformers":
        raise BadInput("The transformers format is a folder; give one with -o.")
    if target.exists() and not force:
        raise BadInput(f"{target} exists; give another name with -o, or --force.")
    path = f"/v1/checkpoints/{chosen['id']}/export"
    if alone:
        count = download_file(session, path, target, dtype=dtype)
    else:
        count = download_folder(session, path, target, dtype=dtype, format=FOLDER_OF[kind])
    result = {"checkpoint": chosen["id"], "step": chosen["step"], "file": str(target), "bytes": count, "format": kind}
    session.output.result(
        result, lambda: session.output.say(f"Wrote {target}, {bytes_text(count)}, step {chosen['step']}.")
    )
