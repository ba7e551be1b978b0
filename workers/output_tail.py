"""From the raw bytes a rank printed to the text that is kept: pure functions.

A progress bar redraws its line with carriage returns: only its last state is kept. Long lines are split by the server,
which sees them whole, whatever the batches they came in.
"""

from __future__ import annotations


def complete_length(pending: bytes, settled: bool) -> int:
    """How many bytes of `pending` may be taken now.

    Up to the last line end. When there is none and the output has `settled` (nothing was added for a while, or the rank
    has ended, or there is too much of it): all of it, but not half a UTF-8 sequence unless nothing else is there.
    """
    end = pending.rfind(b"\n") + 1
    if end or not settled:
        return end
    return _whole_characters(pending)


def _whole_characters(pending: bytes) -> int:
    """Length without an unfinished UTF-8 sequence at the end."""
    for back in range(1, min(4, len(pending)) + 1):
        byte = pending[-back]
        if byte & 0xC0 == 0x80:  # inside a sequence: look further back for its first byte
            continue
        length = 1 if byte < 0x80 else 2 if byte >> 5 == 6 else 3 if byte >> 4 == 14 else 4 if byte >> 3 == 30 else 1
        return len(pending) - back if length > back and len(pending) > back else len(pending)
    return len(pending)


def readable(raw: bytes) -> str:
    """The text to keep of a run of output: UTF-8 with replacement, bars collapsed, NUL shown."""
    text = raw.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\0", "␀")
    return "\n".join(_last_state(line) for line in text.split("\n"))


def _last_state(line: str) -> str:
    """What a terminal would show of a line with carriage returns: the last state that is not empty."""
    if "\r" not in line:
        return line
    states = [state for state in line.split("\r") if state]
    return states[-1] if states else ""
