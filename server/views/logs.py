"""Output of ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime, Field

from server.views.view import View


class LogLine(View):
    """One line of output. `seq` orders the lines of a job."""

    seq: int
    attempt: int
    rank: int
    at: AwareDatetime
    stream: Literal["stdout", "stderr", "shardyard"]
    text: str
    split: bool = Field(default=False, description="the line goes on in the next one: it was too long")
    open: bool = Field(default=False, description="still being written; it may change, and its seq is not final")


class LogView(View):
    """A window of a job's log in time order; without a cursor its tail."""

    items: list[LogLine]
    next_before: int | None = Field(description="pass as before= for older lines; None at the beginning")
    next_after: int | None = Field(description="pass as after= for newer lines")
    dropped_bytes: int = Field(description="output beyond the cap of the attempts, middle dropped")
