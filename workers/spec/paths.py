"""Where a spec may point: relative paths are resolved by who has the file, refused by who has not."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.spec.models import JobSpec, PythonModel, TextData, TokensData
from workers.spec.problems import SpecProblem, shown

STDLIB = "stdlib"


@dataclass(frozen=True)
class SpecPath:
    """A path in a spec and the field it stands in."""

    pointer: str
    path: str


def spec_paths(spec: JobSpec) -> list[SpecPath]:
    """Every path that a spec names."""
    found = []
    if isinstance(spec.model, PythonModel):
        found.append(SpecPath("/model/path", spec.model.path))
    if isinstance(spec.data, TextData) and spec.data.path != STDLIB:
        found.append(SpecPath("/data/path", spec.data.path))
    if isinstance(spec.data, TokensData):
        found.append(SpecPath("/data/path", spec.data.path))
        if spec.data.validation is not None:
            found.append(SpecPath("/data/validation", spec.data.validation))
    return found


def resolve_paths(spec: JobSpec, folder: Path) -> JobSpec:
    """The spec with absolute paths: relative ones are taken from `folder`, that of the spec file; `~` is home."""
    model, data = spec.model, spec.data
    if isinstance(model, PythonModel):
        model = model.model_copy(update={"path": _resolved(model.path, folder)})
    if isinstance(data, TextData) and data.path != STDLIB:
        data = data.model_copy(update={"path": _resolved(data.path, folder)})
    if isinstance(data, TokensData):
        validation = None if data.validation is None else _resolved(data.validation, folder)
        data = data.model_copy(update={"path": _resolved(data.path, folder), "validation": validation})
    return spec.model_copy(update={"model": model, "data": data})


def _resolved(path: str, folder: Path) -> str:
    return os.path.abspath(os.path.join(folder.absolute(), os.path.expanduser(path)))


def path_problems(spec: JobSpec, data_roots: Sequence[Path] | None) -> list[SpecProblem]:
    """What is wrong with the paths of a spec on this machine; an empty list when nothing is.

    Relative paths are refused. With `data_roots`, a path must lie below one of them after links are followed. A path
    that does not exist, is empty, cannot be read or holds too little is named too.
    """
    from workers.data.needs import data_problems  # which reads specs itself

    problems = []
    for entry in spec_paths(spec):
        message = _refusal(entry, spec, data_roots)
        if message:
            problems.append(SpecProblem(entry.pointer, shown(entry.path), message))
    return problems or data_problems(spec)


def _refusal(entry: SpecPath, spec: JobSpec, data_roots: Sequence[Path] | None) -> str | None:
    if not os.path.isabs(entry.path):
        return "must be an absolute path; relative paths work with `shardyard submit`, which knows the spec's folder"
    real = os.path.realpath(entry.path)
    if data_roots is not None and not any(_below(real, os.path.realpath(root)) for root in data_roots):
        return "lies outside the folders this server reads: " + ", ".join(str(root) for root in data_roots)
    try:
        mode = os.stat(real).st_mode
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not os.access(real, os.R_OK):
        return "cannot be read: permission denied"
    if entry.pointer == "/model/path" and not stat.S_ISDIR(mode):
        return "must be the folder that holds the module"
    if isinstance(spec.data, TokensData) and entry.pointer.startswith("/data") and not stat.S_ISREG(mode):
        return "must be a file of token ids"
    if stat.S_ISDIR(mode):
        return None if any(os.scandir(real)) else "is an empty folder"
    if not stat.S_ISREG(mode):
        return "is neither a file nor a folder"
    return None if os.stat(real).st_size else "is an empty file"


def _below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)
