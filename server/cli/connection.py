"""The options that every client command has, and what the command gets in return: a `Session`.

Note: why a decorator builds the options. Typer reads a command's signature. `connected` adds `--server`, `--token`,
`--data-dir` and `--json` to it, so that they can stand anywhere on the line, and hands the command a session instead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from server.cli.client import Client, Json, find_server
from server.cli.errors import BadInput, CommandError
from server.cli.output import Output

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", envvar="SHARDYARD_DATA_DIR", help="Folder of the server.", show_default="~/.shardyard"),
]
Server = Annotated[str | None, typer.Option("--server", envvar="SHARDYARD_SERVER", help="URL of a server elsewhere.")]
Token = Annotated[str | None, typer.Option("--token", envvar="SHARDYARD_TOKEN", help="Token for that server.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout; also when piped.")]

MAX_CHECKPOINTS = 10_000
SEARCHED_JOBS = 1000  # how far back a job may be named by anything but its whole id


def data_folder(given: Path | None) -> Path:
    """The data folder in use, absolute."""
    return (given or Path("~/.shardyard")).expanduser().absolute()


@dataclass(frozen=True)
class Session:
    """A connected command."""

    client: Client
    output: Output

    def job(self, named: str) -> str:
        """The id of the job named by id, by the end or beginning of one, by name, or by "latest". Raises BadInput."""
        if len(named) == 36:
            return named
        jobs = self.client.items("/v1/jobs", 1 if named == "latest" else SEARCHED_JOBS)
        found = jobs if named == "latest" else [job for job in jobs if _is_named(job, named)]
        if len(found) == 1:
            return str(found[0]["id"])
        if not found:
            raise CommandError("There is no job yet." if named == "latest" else f"There is no job {named!r}.")
        ids = ", ".join(job["id"][-8:] for job in found[:8])
        raise BadInput(f"{named!r} names {len(found)} jobs; say which: {ids}")

    def checkpoints(self, job_id: str, *, removed: bool = False) -> list[Json]:
        """Every checkpoint of a job that exists; `removed`: those that retention took, too."""
        return self.client.items(f"/v1/jobs/{job_id}/checkpoints", MAX_CHECKPOINTS, removed=removed)

    def checkpoint(self, job_id: str, named: str) -> Json:
        """The checkpoint of a job named by its id or the end of it. Raises CommandError, BadInput."""
        items = self.checkpoints(job_id, removed=True)  # the server says what became of a removed one
        found = [item for item in items if len(named) >= 4 and item["id"].endswith(named.lower())]
        if len(found) > 1:
            raise BadInput(f"{named!r} names {len(found)} checkpoints; give more of the id.")
        if not found:
            raise CommandError(f"The job has no checkpoint {named!r}.")
        return found[0]


def _is_named(job: Json, named: str) -> bool:
    lowered = named.lower()
    by_id = len(named) >= 4 and (job["id"].endswith(lowered) or job["id"].startswith(lowered))
    return bool(by_id or job["name"] == named)


@contextmanager
def session_with(server: str | None, token: str | None, data_dir: Path | None, as_json: bool) -> Iterator[Session]:
    """A session by the options of `connected`, for a command that needs a server only sometimes."""
    with Client(find_server(server, token, data_folder(data_dir))) as client:
        yield Session(client, Output(as_json))


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Turn `command(session, ...)` into a command with the options above; the session is closed after it."""
    signature = inspect.signature(command, eval_str=True)
    own = list(signature.parameters.values())[1:]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, annotation, default in (
            ("server", Server, None),
            ("token", Token, None),
            ("data_dir", DataDir, None),
            ("as_json", AsJson, False),
        )
    ]

    @functools.wraps(command)
    def with_session(**given: Any) -> None:
        options = [given.pop(name) for name in ("server", "token", "data_dir", "as_json")]
        with session_with(*options) as session:
            command(session, **given)

    with_session.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    with_session.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
    return with_session
