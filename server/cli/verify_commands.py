"""Commands that prove: every byte of a checkpoint is as it was written; a run made again is the same run."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from server.cli.checkpoint_commands import USABLE, named_checkpoint
from server.cli.client import Json
from server.cli.connection import AsJson, DataDir, Server, Session, Token, data_folder, session_with
from server.cli.errors import BadInput, CommandError
from server.cli.output import Output, bytes_text

if TYPE_CHECKING:
    from zero_engine.catalog import CheckpointName

DAMAGED = 1  # exit code
PRESENT = (*USABLE, "corrupt")  # what can be read, to find out what is in it


def verify(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="JOB for its newest one, JOB@STEP, JOB@END of its id, its id, or its folder."
        ),
    ],
    server: Server = None,
    token: Token = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a checkpoint and compare it with its checksum. Exit code 1: it is damaged."""
    if "/" in checkpoint or Path(checkpoint).is_dir():
        _verify_folder(checkpoint, Output(as_json))
        return
    with session_with(server, token, data_dir, as_json) as session:
        known = named_checkpoint(session, checkpoint, PRESENT)["id"]
        found = session.client.post(f"/v1/checkpoints/{known}/verify")
        where = f"Checkpoint of step {found['checkpoint']['step']}"
        read = found["checkpoint"]["bytes"]
        bad = found["checkpoint"]["bad_ranks"]
        result = {"ok": found["ok"], "problems": found["problems"], "bad_ranks": bad, "bytes": read}
        _tell(session.output, where, result)


def _verify_folder(place: str, output: Output) -> None:
    """Without a server: a folder of this machine, or a url that ends with one."""
    from workers.object_store import open_store
    from zero_engine.catalog import list_checkpoints
    from zero_engine.catalog import verify as verify_all
    from zero_engine.store import StoreError

    whole = place if "://" in place else str(Path(place).expanduser().absolute())
    whole = whole.rstrip("/")
    root, _, folder = whole.rpartition("/")
    try:
        _require_a_checkpoint(whole, list_checkpoints(open_store(whole)))
        found = verify_all(open_store(root), folder)
    except StoreError as error:
        raise CommandError(f"The store {root} does not answer: {error}") from error
    damage = [
        {"rank": item.rank, "kind": item.kind, "blocks": list(item.blocks), "problem": item.problem}
        for item in found.damage
    ]
    result = {
        "ok": found.ok,
        "place": whole,
        "problems": list(found.problems),
        "bad_ranks": list(found.bad_ranks),
        "damage": damage,
        "bytes": found.bytes_read,
    }
    _tell(output, whole, result)


def _require_a_checkpoint(place: str, known: Sequence[CheckpointName]) -> None:
    """Raises BadInput for a place that cannot be meant; `known` are the checkpoints below it."""
    if known:
        raise BadInput(f"{place} holds checkpoints and is none itself; name one, as {place}/{known[0].folder}.")
    if "://" not in place and not Path(place).is_dir():
        raise BadInput(f"{place} is no folder; name a checkpoint's, as STORE/step-0000000050-attempt-000001.")


def _tell(output: Output, where: str, result: Json) -> None:
    def draw() -> None:
        if result["ok"]:
            output.say(f"{where}: all {bytes_text(result['bytes'])} are as they were written.")
        for problem in result["problems"]:
            output.say(f"{where}: {problem}")

    output.result(result, draw)
    if not result["ok"]:
        raise typer.Exit(DAMAGED)


def verify_resume(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Job, or a spec file with --checkpoints.")],
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Default: to the next checkpoint.")] = None,
    start: Annotated[
        str | None, typer.Option("--from", help="Folder of the checkpoint; default: the newest with a later step.")
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, help="Run it again on so many ranks.")] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option("--checkpoints", help="Where they lie, if not where the server says."),
    ] = None,
    server: Server = None,
    token: Token = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make steps again from a checkpoint, on this machine, and compare them bit for bit with the run.

    Says bit-exact, or names the first step and the tensors that differ (exit code 1).
    """
    wishes = [] if steps is None else ["--steps", str(steps)]
    wishes += [] if start is None else ["--from", start]
    wishes += [] if ranks is None else ["--set", f"resources.ranks={ranks}"]
    wishes += ["--json"] if Output(as_json).as_json else []
    wishes += ["--data-dir", str(data_folder(data_dir))]
    if Path(job).is_file():
        if checkpoints is None:
            raise BadInput("A spec file says nothing about where its checkpoints lie; add --checkpoints DIR.")
        _become([job, "--checkpoints", checkpoints, *wishes])
    with session_with(server, token, data_dir, as_json) as session:
        asked = _of_job(session, session.job(job), checkpoints or session.client.get("/v1/store")["url"])
    _become([*asked, *wishes])


def _of_job(session: Session, job_id: str, store: str) -> list[str]:
    """Spec, store and what was recorded, as arguments."""
    spec = _handed_on(session.client.get(f"/v1/jobs/{job_id}")["spec"])
    recorded = _handed_on(_recorded(session, job_id))
    return [spec, "--checkpoints", f"{store.rstrip('/')}/{job_id}", "--recorded", recorded]


def _handed_on(content: Json) -> str:
    """JSON in a file without a name, for the program that takes this process's place: nothing stays of it."""
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(content).encode())
        descriptor = os.dup(file.fileno())
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.set_inheritable(descriptor, True)
    return f"/dev/fd/{descriptor}"


def _recorded(session: Session, job_id: str) -> dict[str, dict[str, float]]:
    """Every loss and gradient norm of the job, to the last bit."""
    path = f"/v1/jobs/{job_id}/metrics"
    with session.client.bytes_of(path, format="csv", names="loss,grad_norm") as (_, pieces):
        text = b"".join(pieces).decode()
    found: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(io.StringIO(text, newline="")):
        found.setdefault(row["step"], {})[row["name"]] = float(row["value"])
    return found


def _become(arguments: list[str]) -> NoReturn:
    """The program that trains, with torch in it: its end, however it comes, is the end of the command."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "workers.verify_resume", *arguments])
