"""What a database is asked meanwhile: statements as its driver gets them, many rows of one statement being one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from server.db import Database


@contextmanager
def counted_statements(database: Database) -> Iterator[list[str]]:
    """The statements of readers and writers."""
    engines, seen = {database._reader.sync_engine, database._writer.sync_engine}, list[str]()

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        seen.append(statement)

    for engine in engines:
        event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", note)
