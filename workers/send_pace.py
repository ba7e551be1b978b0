"""How long the sender of a rank's reports waits between two looks at its files. Pure.

Note: why the pauses grow
While a job starts, and in its first seconds of training, a person waits for every line. A rank that has trained for a
minute is looked at once a second: a thousand ranks then cost the server a thousand requests a second less than ten
thousand. What ends a rank is sent at once, whatever the pause.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from workers.spool_progress import STEP_KINDS

BRISK_SECONDS = 0.1
CALM_SECONDS = 1.0
TRAINED_PER_PAUSE = 50.0  # after so many seconds of training a pause of one second
LONGEST_PAUSE_SECONDS = 5.0  # while the server is away


def between_looks(trained_seconds: float) -> float:
    """The pause in seconds, `trained_seconds` after the first step was sent (0 before it)."""
    return min(max(trained_seconds / TRAINED_PER_PAUSE, BRISK_SECONDS), CALM_SECONDS)


def while_away(tries: int) -> float:
    """The pause in seconds after so many tries in a row (1 or more) that the server did not answer."""
    return min(BRISK_SECONDS * 2.0 ** min(tries, 10), LONGEST_PAUSE_SECONDS)


def has_step(records: Iterable[str]) -> bool:
    """Whether a completed step is among the records (JSON texts)."""
    return any(_step(record) > 0 for record in records)


def _step(text: str) -> int:
    try:
        record = json.loads(text)
        return int(record["step"]) if record["kind"] in STEP_KINDS else 0
    except (ValueError, KeyError, TypeError):  # the server will say what is wrong with it
        return 0
