"""Text that can be stored: no NUL and no lone surrogate, which neither a database nor UTF-8 holds.

Checked once, at the edge, for every request: `refuse_unstorable_text` is a dependency of the whole app. Specs and
reports, which their routes read by hand, are checked where they are read.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import Request
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from server.errors import invalid
from workers.spec import SpecError
from workers.spec.document import refuse_unstorable


def _not_blank(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("blank", "must not be blank")
    return text


JobName = Annotated[str, AfterValidator(_not_blank), Field(min_length=1, max_length=200)]


async def refuse_unstorable_text(request: Request) -> None:
    """Raise ApiError 422 when the query or a JSON body holds a character that cannot be stored."""
    for name, text in request.query_params.multi_items():
        _check(name, text)
    if getattr(request.scope.get("route"), "body_field", None) is None:
        return
    body = await request.body()
    if b"\\u" in body:  # only so can JSON hold one; a raw one is no JSON
        _check("", _parsed(body))


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):  # the route says what is wrong with it
        return None


def _check(name: str, value: Any) -> None:
    try:
        refuse_unstorable(value)
    except SpecError as error:
        problem = error.problems[0]
        raise invalid(name or problem.pointer, problem.message) from None
