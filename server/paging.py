"""Keyset pages: a cursor is the sort key of the last row, opaque to the client."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from server.errors import invalid


def write_cursor(sort: str, key: list[Any]) -> str:
    """A cursor after the row with `key`, for lists in the order `sort`."""
    return base64.urlsafe_b64encode(json.dumps([sort, key], ensure_ascii=False).encode()).decode().rstrip("=")


def read_cursor(cursor: str, sort: str, length: int) -> list[Any]:
    """The key in a cursor. Raises ApiError 422 when it is none of ours or belongs to another order."""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        made_for, key = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, binascii.Error, TypeError, RecursionError):
        raise invalid("cursor", "is not a cursor of this list; start again without it") from None
    scalars = isinstance(key, list) and all(part is None or isinstance(part, (str, int, float)) for part in key)
    if made_for != sort or not scalars or len(key) != length:
        raise invalid("cursor", f"belongs to a list in another order than {sort}; start again without it")
    return list(key)
