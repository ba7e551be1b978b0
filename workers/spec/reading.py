"""From text to `JobSpec`: read, override, validate, and say what is wrong at its line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workers.spec.document import MAX_BYTES, Document, read_document, refuse_unstorable
from workers.spec.models import JobSpec, ResourceSpec
from workers.spec.paths import resolve_paths
from workers.spec.problems import Place, SpecError, SpecProblem, located, problems_of, shown

DEFAULT_RANKS = ResourceSpec().ranks
Places = Callable[[], Mapping[str, Place]]


def _nowhere() -> Mapping[str, Place]:
    return {}


def load_spec(text: str | bytes) -> JobSpec:
    """A spec from YAML 1.2 or JSON text. Raises SpecError with every problem at its line, SpecTooLarge above 1 MiB."""
    return parse_document(read_document(text))


def parse_document(document: Document) -> JobSpec:
    """A spec from a text that was read. Raises SpecError with every problem at its line."""
    return _validated(document.data, lambda: document.places)


def parse_spec(data: Any) -> JobSpec:
    """A spec from plain values. Raises SpecError."""
    refuse_unstorable(data)
    return _validated(data, _nowhere)


def _validated(data: Any, places: Places) -> JobSpec:
    if not isinstance(data, dict):
        problem = SpecProblem("", shown(data), "a spec is a set of fields: name, model, data, train, …")
        raise SpecError(located([problem], places()))
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise SpecError(located(problems_of(error, JobSpec, data), places())) from None


def read_spec_file(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """The spec in a file, `a.b=value` overrides applied, relative paths taken from the file's folder.

    An `auto` chunk divides by the ranks written in the file, so that an override of the ranks keeps the bits; with an
    explicit `train.chunk` that one wins. Raises SpecError, OSError.
    """
    with open(path, "rb") as file:
        document = read_document(file.read(MAX_BYTES + 1))
    if not overrides or not isinstance(document.data, dict):
        return resolve_paths(parse_document(document), path.absolute().parent)
    spec = _validated(_overridden(document, overrides), lambda: document.places)
    if spec.train.chunk == "auto":
        resources = document.data.get("resources")
        ranks = resources.get("ranks", DEFAULT_RANKS) if isinstance(resources, dict) else DEFAULT_RANKS
        if isinstance(ranks, int) and ranks >= 1:
            chunk = -(-spec.train.micro_batches // ranks)
            spec = spec.model_copy(update={"train": spec.train.model_copy(update={"chunk": chunk})})
    return resolve_paths(spec, path.absolute().parent)


def _overridden(document: Document, overrides: Sequence[str]) -> Any:
    data = document.data
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals or not all(name.split(".")):
            raise SpecError([SpecProblem("", shown(override), "an override has the form field.field=value")])
        data = _with_value(data, name.split("."), read_document(value).data)
    return data


def _with_value(data: Any, keys: list[str], value: Any) -> Any:
    inner = data if isinstance(data, dict) else {}
    below = value if len(keys) == 1 else _with_value(inner.get(keys[0]), keys[1:], value)
    return {**inner, keys[0]: below}
