"""Where a spec may point: relative paths are resolved by who has the file, refused by who has not."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workers.spec.kinds import FileTokenizer, GptModel, PythonModel, TextData, TokensData
from workers.spec.models import JobSpec
from workers.spec.problems import SpecProblem, shown

if TYPE_CHECKING:
    from workers.transformers_folder import ModelFolder

STDLIB = "stdlib"
START, TOKENIZER = "/model/start", "/data/tokenizer/path"


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
    if isinstance(spec.model, GptModel) and spec.model.start is not None:
        found.append(SpecPath(START, spec.model.start))
    if isinstance(spec.data, TextData) and spec.data.path != STDLIB:
        found.append(SpecPath("/data/path", spec.data.path))
    if isinstance(spec.data, TextData) and isinstance(spec.data.tokenizer, FileTokenizer):
        found.append(SpecPath(TOKENIZER, spec.data.tokenizer.path))
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
    if isinstance(model, GptModel) and model.start is not None:
        model = model.model_copy(update={"start": _resolved(model.start, folder)})
    if isinstance(data, TextData) and isinstance(data.tokenizer, FileTokenizer):
        tokenizer = data.tokenizer.model_copy(update={"path": _resolved(data.tokenizer.path, folder)})
        data = data.model_copy(update={"tokenizer": tokenizer})
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
    return problems or _start_problems(spec) or data_problems(spec)


def _start_problems(spec: JobSpec) -> list[SpecProblem]:
    """A folder of first weights is of the spec's model, tensor by tensor."""
    if not isinstance(spec.model, GptModel) or spec.model.start is None:
        return []
    from workers.data.errors import DataError
    from workers.planner import vocabulary_of
    from workers.transformers_folder import FolderError, misfit, read_folder, shapes_in

    try:
        folder = read_folder(Path(spec.model.start))
        message = _other_shape(spec.model, folder) or misfit(spec.model, vocabulary_of(spec), shapes_in(folder.weights))
    except (FolderError, DataError) as error:
        message = str(error)
    return [SpecProblem(START, shown(spec.model.start), message)] if message else []


def _other_shape(model: GptModel, folder: ModelFolder) -> str | None:
    """A setting that no tensor's shape shows, or shows only as a number."""
    for name in ("layers", "hidden", "heads", "context", "tied"):
        theirs, ours = getattr(folder, name), getattr(model, name)
        if theirs != ours:
            return f"model.{name} is {ours} in the spec and {theirs} in the folder; use {theirs}"
    return None


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
    if entry.pointer == START and not stat.S_ISDIR(mode):
        return "must be a folder with config.json and model.safetensors"
    if entry.pointer == TOKENIZER and not stat.S_ISREG(mode):
        return "must be a tokenizer's file"
    if isinstance(spec.data, TokensData) and entry.pointer.startswith("/data") and not stat.S_ISREG(mode):
        return "must be a file of token ids"
    if stat.S_ISDIR(mode):
        return None if any(os.scandir(real)) else "is an empty folder"
    if not stat.S_ISREG(mode):
        return "is neither a file nor a folder"
    return None if os.stat(real).st_size else "is an empty file"


def _below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)
