"""From a spec file on this machine to what the server is sent: read, overridden, checked, every path absolute."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from server.cli.errors import BadInput, SpecProblems

if TYPE_CHECKING:
    from workers.spec import JobSpec

SpecArgument = Annotated[Path, typer.Argument(metavar="SPEC", help="A job spec, YAML or JSON; `-` reads stdin.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field, as zero.stage=3.")
]


def read_spec(path: Path, overrides: Sequence[str]) -> JobSpec:
    """The spec in a file. Raises SpecProblems with every fault at its line, BadInput when the file cannot be read."""
    from workers.spec import SpecError

    try:
        return _from_stdin(overrides) if str(path) == "-" else _from_file(path, overrides)
    except SpecError as error:
        count = len(error.problems)
        faults = [dataclasses.asdict(problem) for problem in error.problems]
        raise SpecProblems(f"{path}: {count} {'problem' if count == 1 else 'problems'}", faults) from error


def _from_file(path: Path, overrides: Sequence[str]) -> JobSpec:
    from workers.spec import read_spec_file

    try:
        return read_spec_file(path, overrides)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error


def _from_stdin(overrides: Sequence[str]) -> JobSpec:
    from workers.spec import load_spec, resolve_paths

    if overrides:
        raise BadInput("--set works on a file, not on stdin.")
    return resolve_paths(load_spec(sys.stdin.buffer.read()), Path.cwd())


def as_body(spec: JobSpec) -> dict[str, Any]:
    """The spec as the JSON that `POST /v1/jobs` takes."""
    return spec.model_dump(mode="json")
