"""New jobs from old ones: fork a checkpoint, clone a spec, begin with a folder of weights."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from server.cli.checkpoint_commands import CheckpointArgument, named_checkpoint
from server.cli.client import Json
from server.cli.connection import Session
from server.cli.errors import BadInput
from server.cli.follow import follow
from server.cli.jobs_commands import Follow, JobArgument, Key
from server.cli.output import plain, short_id
from server.cli.spec_file import SetOption, SpecArgument, as_body, read_spec

Name = Annotated[str | None, typer.Option("--name", help="Of the new job; default: the old one's.")]


def fork(
    session: Session,
    checkpoint: CheckpointArgument,
    changes: SetOption = None,
    name: Name = None,
    follow_it: Follow = False,
    key: Key = None,
) -> None:
    """Begin a new job at a checkpoint of any job: its weights, moments, step and place in the data."""
    chosen = named_checkpoint(session, checkpoint)
    body = {"checkpoint": chosen["id"], "spec": patch_of(changes or []), "name": name}
    _submit(session, f"/v1/jobs/{chosen['job_id']}/fork", body, key, follow_it)


def clone(
    session: Session,
    job: JobArgument,
    changes: SetOption = None,
    name: Name = None,
    follow_it: Follow = False,
    key: Key = None,
) -> None:
    """Submit a job's spec again as a new job, from step 0."""
    body = {"spec": patch_of(changes or []), "name": name}
    _submit(session, f"/v1/jobs/{session.job(job)}/clone", body, key, follow_it)


def import_folder(
    session: Session,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="config.json, model.safetensors, tokenizer.json.")],
    spec: SpecArgument,
    changes: SetOption = None,
    follow_it: Follow = False,
    key: Key = None,
) -> None:
    """Begin a job with the weights and tokenizer of a GPT-2 folder, at step 0 with a fresh optimizer."""
    begins = with_folder(read_spec(spec, changes or []).model_dump(mode="json"), folder.expanduser().absolute())
    _submit(session, "/v1/jobs", begins, key, follow_it)


def with_folder(spec: Json, folder: Path) -> Json:
    """The spec with the model and the tokenizer of a folder. Raises BadInput when it does not fit, by parameter."""
    from workers.spec import SpecError, parse_spec
    from workers.spec.paths import path_problems
    from workers.transformers_folder import FolderError, read_folder

    try:
        found = read_folder(folder)
    except FolderError as error:
        raise BadInput(str(error)) from error
    data: dict[str, Any] = dict(spec["data"])
    if data["kind"] == "text" and found.tokenizer is not None:
        data["tokenizer"] = {"kind": "file", "path": str(found.tokenizer)}
    try:
        begun = parse_spec({**spec, "model": found.fields(), "data": data})
    except SpecError as error:
        raise BadInput(f"The spec cannot begin with {folder}: {error.problems[0]}") from error
    problems = path_problems(begun, None)
    if problems:
        raise BadInput(f"The spec cannot begin with {folder}: {problems[0]}")
    return as_body(begun)


def patch_of(changes: Sequence[str]) -> Json:
    """The merge patch that FIELD=VALUE options say; an empty value brings the default back. Raises BadInput."""
    from workers.spec import SpecError
    from workers.spec.document import read_document

    patch: Json = {}
    for change in changes:
        name, equals, value = change.partition("=")
        keys = name.split(".")
        if not equals or not all(keys):
            raise BadInput(f"--set {change!r} has not the form field.field=value.")
        try:
            read = read_document(value).data if value else None
        except SpecError as error:
            raise BadInput(f"--set {change!r}: {error.problems[0].message}") from error
        place = patch
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = read
    return patch


def _submit(session: Session, path: str, body: Json, key: str | None, follow_it: bool) -> None:
    sent = {name: value for name, value in body.items() if value is not None}
    job = session.client.post_once(path, sent, key or uuid.uuid4().hex)
    if follow_it:
        session.output.say(f"Submitted {plain(job['name'])} as {job['id']}.")
        follow(session, job["id"])
        return
    session.output.result(job, lambda: _say(session, job))


def _say(session: Session, job: Json) -> None:
    start = "" if job["fork_step"] is None else f", which begins at step {job['fork_step']}"
    session.output.say(f"Submitted {plain(job['name'])} as {job['id']}{start}.")
    session.output.say(
        f"See it: {session.client.address.url}/jobs/{job['id']}  or: shardyard watch {short_id(job['id'])}"
    )


import_folder.__name__ = "import"
