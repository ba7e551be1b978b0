"""A spec in a request body, YAML or JSON: read, validated, its paths checked against this machine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from server.errors import ApiError
from server.rows.actions import too_many_ranks
from server.settings import Settings
from workers.spec import JobSpec, SpecError, path_problems
from workers.spec.document import read_document
from workers.spec.problems import located
from workers.spec.reading import parse_document

YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")
JSON_TYPES = ("application/json",)

MLP_EXAMPLE: dict[str, Any] = {
    "name": "digits",
    "model": {"kind": "mlp"},
    "data": {"kind": "digits"},
    "train": {"steps": 100},
}
GPT_EXAMPLE: dict[str, Any] = {
    "name": "gpt-on-stdlib",
    "tags": ["demo"],
    "model": {"kind": "gpt", "layers": 6, "hidden": 256},
    "data": {"kind": "text", "path": "stdlib"},
    "train": {"steps": 300, "global_batch": 16, "micro_batch": 4},
    "zero": {"stage": 2},
    "resources": {"ranks": 2},
}
YAML_EXAMPLE = """\
name: digits
model: {kind: mlp}
data: {kind: digits}
train: {steps: 100}
"""
OPENAPI: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/JobSpec"},
                "examples": {
                    "shortest": {"summary": "the shortest useful spec", "value": MLP_EXAMPLE},
                    "gpt": {"summary": "a GPT on the standard library, ZeRO stage 2", "value": GPT_EXAMPLE},
                },
            },
            "application/yaml": {"schema": {"type": "string"}, "example": YAML_EXAMPLE},
        },
    }
}


@dataclass(frozen=True)
class SpecBody:
    """A spec as it came."""

    spec: JobSpec
    text: str  # as sent


async def read_spec(request: Request, settings: Settings) -> SpecBody:
    """The spec of a request. Raises ApiError 413, 415, 422 and SpecError."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind not in (*YAML_TYPES, *JSON_TYPES):
        raise ApiError(415, f"Send the spec as application/json or application/yaml, not {kind[:80]!r}.")
    return await asyncio.to_thread(_checked, await request.body(), settings)  # YAML of 1 MiB takes a while


def _checked(raw: bytes, settings: Settings) -> SpecBody:
    document = read_document(raw)
    spec = parse_document(document)
    problems = path_problems(spec, settings.roots)
    if problems:
        raise SpecError(located(problems, document.places))
    if spec.resources.ranks > settings.max_ranks:
        raise too_many_ranks("/resources/ranks", spec.resources.ranks, settings.max_ranks)
    return SpecBody(spec, raw.decode("utf-8-sig"))
