"""What is wrong with a spec, said so that it can be mended: where, what stands there, what to write instead."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class Place:
    """Where a value stands in its text; both count from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class SpecProblem:
    """One thing that is wrong, with the JSON pointer (RFC 6901) of the field."""

    pointer: str
    value: str  # as JSON, shortened; empty where nothing stands
    message: str
    suggestion: str | None = None
    line: int | None = None  # from 1, when the text is known
    column: int | None = None
    option: str | None = None  # of the command line, where that gave the value and not the text

    def __str__(self) -> str:
        where = f"{self.option}: " if self.option else f"line {self.line}: " if self.line else ""
        hint = f" (did you mean {self.suggestion}?)" if self.suggestion else ""
        return f"{where}{self.pointer or '(spec)'}: {self.message}{hint}"


class SpecError(Exception):
    """A spec cannot be used. `problems` has at least one entry."""

    code = "invalid_spec"

    def __init__(self, problems: Iterable[SpecProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class SpecTooLarge(SpecError):
    """The text is longer than what is read at all (HTTP 413)."""

    code = "spec_too_large"

    def __init__(self, message: str) -> None:
        super().__init__([SpecProblem("", "", message)])


def child(pointer: str, key: str | int) -> str:
    """The pointer of a field or item below `pointer`."""
    return f"{pointer}/{str(key).replace('~', '~0').replace('/', '~1')}"


def shown(value: Any) -> str:
    """A value as short JSON-like text, fit for a message."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def located(problems: Iterable[SpecProblem], places: Mapping[str, Place]) -> list[SpecProblem]:
    """The problems with the line and column of their field, or of the nearest part of the text that contains it."""
    found = []
    for problem in problems:
        pointer = problem.pointer
        unknown_field = problem.message.startswith("unknown field")
        place = places.get(pointer + "#key") if unknown_field else None
        while place is None and pointer:
            place = places.get(pointer)
            pointer = pointer.rpartition("/")[0]
        place = place or places.get("")
        found.append(
            replace(problem, line=place.line, column=place.column)
            if place and problem.line is None and problem.option is None
            else problem
        )
    return found


def problems_of(error: ValidationError, model: type[BaseModel], data: Any) -> list[SpecProblem]:
    """A pydantic error on `data` as problems, one per field, in the order of the text's fields."""
    merged: dict[str, SpecProblem] = {}
    for detail in error.errors(include_url=False):
        problem = _problem(detail, model, data)
        earlier = merged.get(problem.pointer)
        if earlier is None:
            merged[problem.pointer] = problem
        elif problem.message not in earlier.message:
            merged[problem.pointer] = replace(earlier, message=f"{earlier.message}, or {problem.message}")
    return list(merged.values())


def _problem(detail: Any, model: type[BaseModel], data: Any) -> SpecProblem:
    kind, context = str(detail["type"]), detail.get("ctx") or {}
    pointer, owner, value = _walk(model, data, detail["loc"])
    if "pointer" in context:
        found = _value_at(data, str(context["pointer"]))
        return SpecProblem(str(context["pointer"]), shown(found) if found is not None else "", str(detail["msg"]))
    if kind == "missing":
        return SpecProblem(pointer, "", "this field is required")
    if kind == "extra_forbidden":
        name = str(detail["loc"][-1])
        meant = _meant(name, pointer, owner, model)
        known = "" if meant else f"; here stand {', '.join(_field_names(owner))}"
        return SpecProblem(pointer, shown(value), f"unknown field {shown(name)}{known}", meant)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tags = _tags(str(context.get("expected_tags", ""))) or _kinds(owner, detail["loc"])
        message = "must be one of " + ", ".join(tags)
        kind_value = value.get("kind") if isinstance(value, dict) else None
        if kind_value is None:
            return SpecProblem(child(pointer, "kind"), "", f"this field is required: it {message}")
        return SpecProblem(child(pointer, "kind"), shown(kind_value), message, _nearest(str(kind_value), tags))
    if kind == "literal_error":
        choices = _tags(str(context.get("expected", "")))
        return SpecProblem(pointer, shown(value), "must be " + _either(choices), _nearest(str(value), choices))
    return SpecProblem(pointer, shown(value), _sentence(kind, context, str(detail["msg"]), value))


def _sentence(kind: str, context: Mapping[str, Any], message: str, value: Any) -> str:
    bounds = {
        "greater_than_equal": ("must be at least", "ge"),
        "greater_than": ("must be greater than", "gt"),
        "less_than_equal": ("must be at most", "le"),
        "less_than": ("must be less than", "lt"),
    }
    if kind in bounds:
        words, key = bounds[kind]
        return f"{words} {context[key]}"
    fixed = {
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "int_parsing": "must be a whole number",
        "int_parsing_size": "must be a smaller whole number",
        "float_type": "must be a number",
        "float_parsing": "must be a number",
        "finite_number": "must be a finite number",
        "string_type": "must be text",
        "bool_type": "must be true or false",
        "list_type": "must be a list",
        "dict_type": "must be a set of fields",
        "model_type": "must be a set of fields",
        "model_attributes_type": "must be a set of fields",
    }
    if kind in fixed:
        return fixed[kind]
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "string_too_long":
        return f"must have at most {context['max_length']} characters"
    if kind in ("too_short", "too_long"):
        words, key = ("at least", "min_length") if kind == "too_short" else ("at most", "max_length")
        number, noun = context[key], "character" if isinstance(value, str) else "item"
        return f"must have {words} {number} {noun}{'s' if number != 1 else ''}"
    return message


def _either(choices: Sequence[str]) -> str:
    return " or ".join([", ".join(choices[:-1]), choices[-1]]) if len(choices) > 1 else "".join(choices)


def _tags(expected: str) -> list[str]:
    parts = expected.replace(" or ", ", ").split(", ")
    return [part.strip("'\"") for part in parts if part]


def _nearest(name: str, choices: Sequence[str]) -> str | None:
    lowered = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def _meant(name: str, pointer: str, owner: Any, root: type[BaseModel]) -> str | None:
    """The field that an unknown `name` stands for: this one elsewhere, as `zero.stage`, or one much like it here.

    At this very place it may belong to another kind; that is no way out.
    """
    here, place = _field_names(owner), pointer[1:].replace("/", ".")
    elsewhere = [path for path in _paths_below(root) if path != place]
    misplaced = next((path for path in elsewhere if path.endswith(f".{name.lower()}")), None)
    return misplaced or _nearest(name, here) or _long_for(name, here) or _long_for(name, elsewhere)


def _long_for(name: str, paths: Sequence[str]) -> str | None:
    """The first field whose name is the initials of `name`: `learning_rate` is long for `lr`."""
    initials = "".join(word[0] for word in name.lower().split("_") if word)
    return next((path for path in paths if len(initials) > 1 and path.split(".")[-1] == initials), None)


def _paths_below(annotation: Any, prefix: str = "") -> Iterator[str]:
    """Every field of a model and of the models in it, by dotted path."""
    for arm in arms_of(annotation):
        for name, field in _fields(arm).items():
            yield prefix + name
            yield from _paths_below(field.annotation, f"{prefix}{name}.")


# Note: why the models are walked beside the data. A pydantic location holds the tags of discriminated unions and the
# names of union branches between the real keys ("model", "gpt", "layers"). Only the annotations tell them apart.


def _walk(model: type[BaseModel], data: Any, loc: Sequence[str | int]) -> tuple[str, Any, Any]:
    """The pointer of `loc`, the type that owns its last key, and the value there (None when missing)."""
    pointer, annotation, value = "", typing.cast(Any, model), data
    owner = annotation
    for key in loc:
        arms = arms_of(annotation)
        if len(arms) > 1:
            chosen = [arm for arm in arms if _is_tag(arm, key)]
            if chosen:
                annotation = chosen[0]
                continue
            if isinstance(key, str) and not (isinstance(value, dict) and key in value):
                continue  # the name of a branch of an untagged union
        if not isinstance(value, (dict, list)) and value is not None:
            continue
        owner = annotation
        pointer = child(pointer, key)
        value = _get(value, key)
        annotation = _child_type(annotation, key)
    return pointer, owner, value


def _get(value: Any, key: str | int) -> Any:
    if isinstance(value, dict):
        return value.get(key)
    if isinstance(value, list) and isinstance(key, int) and key < len(value):
        return value[key]
    return None


def _value_at(data: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        data = _get(data, part.replace("~1", "/").replace("~0", "~"))
    return data


def arms_of(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation: of a union each, else itself."""
    if typing.get_origin(annotation) is typing.Annotated:
        return arms_of(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(arm for each in typing.get_args(annotation) for arm in arms_of(each))
    return (annotation,)


def _fields(annotation: Any) -> dict[str, FieldInfo]:
    (arm, *_) = arms_of(annotation)
    return arm.model_fields if isinstance(arm, type) and issubclass(arm, BaseModel) else {}


def _field_names(annotation: Any) -> list[str]:
    return list(_fields(annotation))


def _is_tag(arm: Any, key: str | int) -> bool:
    kind = _fields(arm).get("kind")
    return kind is not None and key in typing.get_args(kind.annotation)


def _kinds(annotation: Any, loc: Sequence[str | int]) -> list[str]:
    field = _fields(annotation).get(str(loc[-1])) if loc else None
    arms = arms_of(field.annotation) if field else ()
    return [str(kind) for arm in arms for kind in typing.get_args(_fields(arm)["kind"].annotation)]


def _child_type(annotation: Any, key: str | int) -> Any:
    (arm, *_) = arms_of(annotation)
    if isinstance(key, int):
        return next(iter(typing.get_args(arm)), None)
    field = _fields(arm).get(key)
    return field.annotation if field else None
