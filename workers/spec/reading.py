"""From text to `JobSpec`: read, override, validate, and say what is wrong at its line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workers.spec.document import MAX_BYTES, Document, read_document, refuse_unstorable
from workers.spec.models import JobSpec, ResourceSpec
from workers.spec.paths import resolve_paths
from workers.spec.problems import Place, SpecError, SpecProblem, child, located, problems_of, shown

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


@dataclass(frozen=True)
class Override:
    """A value that the command line gives a field."""

    name: str  # "train.steps"
    value: str  # YAML
    option: str  # as it was typed, for messages

    @property
    def pointer(self) -> str:
        pointer = ""
        for key in self.name.split("."):
            pointer = child(pointer, key)
        return pointer


def read_spec_file(path: Path, overrides: Sequence[str] = (), ranks: int | None = None) -> JobSpec:
    """The spec in a file, `a.b=value` overrides and then `ranks` applied, relative paths taken from the file's folder.

    An `auto` chunk divides by the ranks written in the file, so that an override of the ranks keeps the bits; with an
    explicit `train.chunk` that one wins. Raises SpecError, OSError.
    """
    with open(path, "rb") as file:
        document = read_document(file.read(MAX_BYTES + 1))
    given = [_override(text) for text in overrides]
    if ranks is not None:
        given.append(Override("resources.ranks", str(ranks), f"--ranks {ranks}"))
    if not given or not isinstance(document.data, dict):
        return resolve_paths(parse_document(document), path.absolute().parent)
    spec = _with_overrides(document, given)
    if spec.train.chunk == "auto":
        resources = document.data.get("resources")
        ranks = resources.get("ranks", DEFAULT_RANKS) if isinstance(resources, dict) else DEFAULT_RANKS
        if isinstance(ranks, int) and ranks >= 1:
            chunk = -(-spec.train.micro_batches // ranks)
            spec = spec.model_copy(update={"train": spec.train.model_copy(update={"chunk": chunk})})
    return resolve_paths(spec, path.absolute().parent)


def _override(text: str) -> Override:
    name, equals, value = text.partition("=")
    option = f"--set {text}"
    if not equals or not all(name.split(".")):
        raise SpecError([SpecProblem("", shown(text), "an override has the form field.field=value", option=option)])
    return Override(name, value, option)


def _with_overrides(document: Document, overrides: Sequence[Override]) -> JobSpec:
    """The text's values with the overrides. Raises SpecError; what an override gave is named by its option."""
    data = document.data
    for override in overrides:
        data = _with_value(data, override.name.split("."), _value_of(override))
    try:
        return _validated(data, _nowhere)
    except SpecError as error:
        problems = [_by_option(problem, overrides, document) for problem in error.problems]
        raise SpecError(located(problems, document.places)) from None


def _value_of(override: Override) -> Any:
    try:
        return read_document(override.value).data
    except SpecError as error:
        faults = [SpecProblem(override.pointer, "", each.message, option=override.option) for each in error.problems]
        raise SpecError(faults) from None


def _by_option(problem: SpecProblem, overrides: Sequence[Override], document: Document) -> SpecProblem:
    """The problem with the last option that gave its field, a part that holds it, or one in it that the text lacks."""
    pointer, in_text = problem.pointer, problem.pointer in document.places
    for override in reversed(overrides):
        within = _is_within(pointer, override.pointer) or (not in_text and _is_within(override.pointer, pointer))
        if within:
            return replace(problem, option=override.option)
    return problem


def _is_within(pointer: str, outer: str) -> bool:
    return pointer == outer or pointer.startswith(f"{outer}/")


def _with_value(data: Any, keys: list[str], value: Any) -> Any:
    inner = data if isinstance(data, dict) else {}
    below = value if len(keys) == 1 else _with_value(inner.get(keys[0]), keys[1:], value)
    return {**inner, keys[0]: below}
