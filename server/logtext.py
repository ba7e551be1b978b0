"""From raw pieces of a rank's output to lines that a page can show. Pure.

Escape sequences are dropped, `\\r` starts the line again (a progress bar collapses to its last state), control
characters go, and a line longer than LINE_CHARACTERS is split with a mark. However the output is cut into pieces, the
lines are the same: the state between two pieces is all there is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LINE_CHARACTERS = 8192
ESCAPE_CHARACTERS = 4096  # a sequence longer than this is not one

# ECMA-48 and xterm: CSI ... final; OSC, DCS, SOS, PM, APC ... BEL or ST; two-character escapes
_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]+[0-~]|[0-OQ-WYZ\\`-~])"
    r"|\x9b[0-?]*[ -/]*[@-~]"
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?|[ -/]*)\Z|\x9b[0-?]*[ -/]*\Z")
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class OpenLine:
    """The line that is being written, and what is needed to go on."""

    text: str = ""
    carriage_return: bool = False  # the next character starts the line again
    escape: str = ""  # an escape sequence that is not yet complete


@dataclass(frozen=True)
class Line:
    """A finished line; `split` when it goes on in the next one."""

    text: str
    split: bool = False


def read_piece(state: OpenLine, piece: str) -> tuple[OpenLine, list[Line]]:
    """Lines that `piece` finishes, and the state after it."""
    clean, escape = _without_escapes(state.escape + piece)
    text, returned = state.text, state.carriage_return
    lines: list[Line] = []
    for part in re.split(r"([\r\n])", clean):
        if part == "\n":
            lines.append(Line(text))
            text, returned = "", False
        elif part == "\r":
            returned = True
        elif part:
            text, returned = ("" if returned else text) + part, False
            whole = max(0, len(text) - 1) // LINE_CHARACTERS * LINE_CHARACTERS
            lines += [Line(text[i : i + LINE_CHARACTERS], split=True) for i in range(0, whole, LINE_CHARACTERS)]
            text = text[whole:]
    return OpenLine(text, returned, escape), lines


def finish(state: OpenLine) -> list[Line]:
    """The last line of an output that does not end with a newline."""
    return [Line(state.text)] if state.text else []


def _without_escapes(text: str) -> tuple[str, str]:
    unfinished = _UNFINISHED.search(text)
    rest = ""
    if unfinished is not None and len(unfinished.group()) < ESCAPE_CHARACTERS:
        text, rest = text[: unfinished.start()], unfinished.group()
    return _CONTROLS.sub("", _ESCAPE.sub("", text)), rest
