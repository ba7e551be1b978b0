"""A YAML 1.2 or JSON text as plain values, with the line and column of every one of them.

Built from parser events under limits on size, depth and number of values, so that no text costs more than its size: a
bomb of aliases, a thousand nested lists or a megabyte of keys is refused while it is read.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from workers.spec.problems import Place, SpecError, SpecProblem, SpecTooLarge, child, located, shown

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_VALUES = 20_000  # after aliases are written out

_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"([-+]?)(\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN|NaN|[-+]?Infinity")
_MAX_DIGITS = 400


@dataclass(frozen=True)
class Document:
    """The values of a text, and the text itself to say where they stand."""

    data: Any
    text: str

    @cached_property
    def places(self) -> dict[str, Place]:
        """Line and column by JSON pointer (RFC 6901); empty where a text that is JSON cannot be read as YAML."""
        builder = _Builder(checks_text=False)
        with contextlib.suppress(SpecError):
            builder.build(_events(self.text))
        return builder.places


def read_document(text: str | bytes) -> Document:
    """Read YAML or JSON. Raises SpecTooLarge above 1 MiB and SpecError for anything that is not one document."""
    text = _decoded(text)
    if not text.lstrip().startswith("{"):
        return Document(_Builder().build(_events(text)), text)
    try:
        document = Document(json.loads(text, object_pairs_hook=_without_repeats, parse_int=_short_int), text)
    except (ValueError, RecursionError):  # a YAML mapping in braces, or JSON whose fault YAML's reader names better
        return Document(_Builder().build(_events(text)), text)
    try:
        refuse_unstorable(document.data)
    except SpecError as error:
        raise SpecError(located(error.problems, document.places)) from None
    return document


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field stands twice")
    return found


def _short_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError("too many digits")
    return int(digits)


def _decoded(text: str | bytes) -> str:
    size_bytes = len(text) if isinstance(text, bytes) else len(text.encode("utf-8", "surrogatepass"))
    if size_bytes > MAX_BYTES:
        raise SpecTooLarge(f"the spec has {size_bytes:,} bytes; at most {MAX_BYTES:,} (1 MiB) are accepted")
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            [SpecProblem("", "", f"the spec is not UTF-8 text: byte {error.start} cannot be decoded")]
        ) from None


def _events(text: str) -> Iterator[Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        yield from YAML(typ="safe", pure=True).parse(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(mark.line + 1, mark.column + 1) if mark else Place(1, 1)
        raise SpecError([_unreadable(str(error.problem or error.context), place)]) from None
    except YAMLError as error:  # a character that YAML does not allow
        position = getattr(error, "position", 0)
        before = text[: position if isinstance(position, int) else 0]
        place = Place(before.count("\n") + 1, len(before) - before.rfind("\n"))
        raise SpecError([_unreadable(str(getattr(error, "reason", error)), place)]) from None


def _unreadable(reason: str, place: Place) -> SpecProblem:
    return SpecProblem("", "", f"this is neither YAML nor JSON: {reason}", line=place.line, column=place.column)


def _unstorable(text: str) -> str | None:
    """The first character that no database or UTF-8 file can hold."""
    return next((c for c in text if c == "\0" or 0xD800 <= ord(c) <= 0xDFFF), None)


@dataclass
class _Open:
    """A mapping or sequence whose end has not been read."""

    value: dict[str, Any] | list[Any]
    pointer: str
    place: Place
    anchor: str | None
    first: int  # values read before it
    key: str | None = None  # of a mapping: read, its value not yet


@dataclass
class _Builder:
    """Turns parser events into values without recursion."""

    checks_text: bool = True  # refuse characters that cannot be stored
    places: dict[str, Place] = field(default_factory=dict)
    anchors: dict[str, tuple[Any, int]] = field(default_factory=dict)  # value, number of values in it
    values: int = 0
    stack: list[_Open] = field(default_factory=list)
    root: Any = None

    def build(self, events: Iterator[Any]) -> Any:
        documents = 0
        for event in events:
            place = Place(event.start_mark.line + 1, event.start_mark.column + 1)
            name = type(event).__name__
            if name == "DocumentStartEvent":
                documents += 1
                if documents > 1:
                    raise SpecError([_unreadable("a second document begins here; a spec is one document", place)])
            elif name == "ScalarEvent":
                self._scalar(event, place)
            elif name == "AliasEvent":
                self._alias(event, place)
            elif name in ("MappingStartEvent", "SequenceStartEvent"):
                self._open({} if name == "MappingStartEvent" else [], event, place)
            elif name in ("MappingEndEvent", "SequenceEndEvent"):
                self._close()
        return self.root

    def _pointer(self) -> str:
        if not self.stack:
            return ""
        top = self.stack[-1]
        if isinstance(top.value, list):
            return child(top.pointer, len(top.value))
        return top.pointer if top.key is None else child(top.pointer, top.key)

    def _count(self, number: int, place: Place) -> None:
        self.values += number
        if self.values > MAX_VALUES:
            raise self._refused(f"the spec has more than {MAX_VALUES:,} values", place)

    def _refused(self, message: str, place: Place, value: str = "") -> SpecError:
        return SpecError([SpecProblem(self._pointer(), value, message, line=place.line, column=place.column)])

    def _open(self, value: dict[str, Any] | list[Any], event: Any, place: Place) -> None:
        self._expects_value(place)
        if len(self.stack) >= MAX_DEPTH:
            raise self._refused(f"values are nested more than {MAX_DEPTH} deep", place)
        self._count(1, place)
        pointer = self._pointer()
        self.places[pointer] = place
        self.stack.append(_Open(value, pointer, place, event.anchor, self.values - 1))

    def _close(self) -> None:
        done = self.stack.pop()
        self._store(done.value, done.anchor, self.values - done.first)

    def _alias(self, event: Any, place: Place) -> None:
        self._expects_value(place)
        if event.anchor not in self.anchors:
            raise self._refused(
                f"the alias *{event.anchor} has no anchor &{event.anchor} that is complete before it", place
            )
        value, number = self.anchors[event.anchor]
        self._count(number, place)
        self.places[self._pointer()] = place
        self._store(value, None, number)

    def _scalar(self, event: Any, place: Place) -> None:
        top = self.stack[-1] if self.stack else None
        if top is not None and isinstance(top.value, dict) and top.key is None:
            self._key(top, event, place)
            return
        self._count(1, place)
        if not event.value:  # nothing stands there: the parser names the next token, a person looks at the field
            place = self.places.get(self._pointer() + "#key", place)
        self.places[self._pointer()] = place
        plain = event.style in (None, "") and event.implicit[0]
        self._store(self._plain(event.value, place) if plain else self._text(event.value, place), event.anchor, 1)

    def _key(self, top: _Open, event: Any, place: Place) -> None:
        key = self._text(event.value, place)
        if key == "<<":
            raise self._refused("merge keys (<<) are not supported; write the fields out", place, key)
        if key in top.value:
            raise SpecError(
                [
                    SpecProblem(
                        child(top.pointer, key),
                        "",
                        f"the field {shown(key)} stands twice",
                        line=place.line,
                        column=place.column,
                    )
                ]
            )
        top.key = key
        self.places[child(top.pointer, key) + "#key"] = place

    def _expects_value(self, place: Place) -> None:
        top = self.stack[-1] if self.stack else None
        if top is not None and isinstance(top.value, dict) and top.key is None:
            raise self._refused("a field name must be text", place)

    def _store(self, value: Any, anchor: str | None, number: int) -> None:
        if anchor:
            self.anchors[anchor] = (value, number)
        if not self.stack:
            self.root = value
            return
        top = self.stack[-1]
        if isinstance(top.value, list):
            top.value.append(value)
        else:
            top.value[str(top.key)] = value
            top.key = None

    def _text(self, value: str, place: Place) -> str:
        bad = _unstorable(value) if self.checks_text else None
        if bad:
            raise self._refused(f"the character U+{ord(bad):04X} cannot be stored", place)
        return value

    def _plain(self, value: str, place: Place) -> Any:
        if _NULL.fullmatch(value):
            return None
        if _TRUE.fullmatch(value) or _FALSE.fullmatch(value):
            return value[0] in "tT"
        if _INT.fullmatch(value):
            if len(value) > _MAX_DIGITS:
                raise self._refused(f"a number of {len(value)} digits is too large", place, shown(value))
            return int(value, {"0x": 16, "0o": 8}.get(value[:2], 10))
        if _FLOAT.fullmatch(value):
            return float(value)
        if _INFINITE.fullmatch(value):
            return math.nan if "a" in value.lower() else (-math.inf if value[0] == "-" else math.inf)
        return self._text(value, place)


def refuse_unstorable(data: Any) -> None:
    """Raise SpecError when plain values that came another way break the limits of a text: depth, number, characters."""
    open_values: list[tuple[str, int, Any]] = [("", 0, data)]
    values = 0
    while open_values:
        pointer, depth, value = open_values.pop()
        values += 1
        if depth > MAX_DEPTH:
            raise SpecError([SpecProblem(pointer, "", f"values are nested more than {MAX_DEPTH} deep")])
        if values > MAX_VALUES:
            raise SpecError([SpecProblem(pointer, "", f"the spec has more than {MAX_VALUES:,} values")])
        if isinstance(value, dict):
            for key, inner in value.items():
                if not isinstance(key, str) or _unstorable(key):
                    raise SpecError([SpecProblem(pointer, repr(key), "a field name must be text that can be stored")])
                open_values.append((child(pointer, key), depth + 1, inner))
        elif isinstance(value, list):
            open_values += [(child(pointer, index), depth + 1, inner) for index, inner in enumerate(value)]
        elif isinstance(value, str) and (bad := _unstorable(value)):
            raise SpecError([SpecProblem(pointer, "", f"the character U+{ord(bad):04X} cannot be stored")])
