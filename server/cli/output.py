"""How results are shown: tables and sentences on a terminal, JSON with --json or when piped."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Cell = str | None

STATUS_STYLE = {
    "queued": "yellow",
    "starting": "cyan",
    "running": "green",
    "stopping": "magenta",
    "paused": "blue",
    "cancelled": "bright_black",
    "succeeded": "bold green",
    "failed": "bold red",
    "deleting": "bright_black",
    "delete_failed": "red",
}

_ESCAPES = re.compile(r"\x1b(\][^\x07\x1b]*(\x07|\x1b\\)?|\[[0-?]*[ -/]*[@-~]?|.)?")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Text of others, fit for a terminal: no escape sequence, control or direction override acts on the screen."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", _ESCAPES.sub("", text))


class Output:
    """Where a command's result goes. `as_json` also holds when stdout is no terminal."""

    def __init__(self, as_json: bool = False, terminal: bool | None = None) -> None:
        self.terminal = sys.stdout.isatty() if terminal is None else terminal
        self.asked_for_json = as_json
        self.as_json = as_json or not self.terminal

    @cached_property
    def console(self) -> Console:
        """Rich, loaded when something is drawn; names and logs are text to it, never markup."""
        from rich.console import Console

        return Console(markup=False, highlight=False, emoji=False, soft_wrap=False)

    def result(self, value: Any, draw: Callable[[], None]) -> None:
        """One JSON document, indented for people, or whatever `draw` prints."""
        if self.as_json:
            print(json.dumps(value, ensure_ascii=False, indent=2))
        else:
            draw()

    def line(self, value: Any) -> None:
        """One compact JSON object on a line of its own, at once."""
        print(json.dumps(value, ensure_ascii=False, separators=(",", ":")), flush=True)

    def say(self, text: str) -> None:
        """A sentence for people; nothing in JSON output."""
        if not self.as_json:
            self.console.print(text)

    def draw(self, drawing: RenderableType) -> None:
        """Anything of rich."""
        self.console.print(drawing)

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[Cell | RenderableType]]) -> None:
        """A table; a heading that begins with ">" is aligned to the right, the cells of one with "~" may wrap."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for heading in headings:
            table.add_column(
                heading.lstrip(">~"),
                justify="right" if heading.startswith(">") else "left",
                no_wrap=not heading.startswith("~"),
                overflow="fold",
            )
        for row in rows:
            table.add_row(*(plain(cell) if isinstance(cell, str) else cell for cell in row))
        self.console.print(table)


def status_text(status: str) -> RenderableType:
    """A status in its colour."""
    from rich.text import Text

    return Text(status, style=STATUS_STYLE.get(status, ""))


def short_id(job_id: str) -> str:
    """The random end of a UUIDv7, enough to name a job by."""
    return job_id[-8:]


def bytes_text(count: float | None) -> str:
    """`1.5 MiB`, in the binary units of the pages and of the plan's advice."""
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 1000 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.4g} PiB"


def seconds_text(seconds: float | None) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`, `3 d 4 h`."""
    if seconds is None:
        return "-"
    if seconds == 0:
        return "0 s"
    if seconds < 0.1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def age_text(at: str | None, now: datetime | None = None) -> str:
    """How long ago a time of the API was."""
    if at is None:
        return "-"
    return seconds_text(max(0.0, ((now or datetime.now(UTC)) - datetime.fromisoformat(at)).total_seconds()))


def counted_in(job: Mapping[str, Any]) -> str:
    """What a job's rate counts: tokens, or samples where its data are none."""
    return "samples" if job["spec"]["data"]["kind"] == "digits" else "tokens"


def number_text(value: float | str | None, digits: int = 4) -> str:
    """A number of the API, where "NaN" and the infinities are strings."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
