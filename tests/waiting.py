"""Waiting for a condition: the limit is for what never comes, so it is far above what a loaded machine needs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_SECONDS = 240.0  # below the limit of a test in pyproject.toml, so that the wait can say what it waited for
LOOK_SECONDS = 0.02
LOOK_SHARE = 9  # as many times as long as a look took is waited for the next: what is waited for needs the core
MOST_SECONDS = 1.0  # between looks


def stretched(seconds: float) -> float:
    """A limit of an idle machine, longer by as many times as there are processes for a core now."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_for(
    look: Callable[[], T], what: str = "", story: Callable[[], object] = str, seconds: float = PATIENCE_SECONDS
) -> T:
    """The first true value of `look`. When it never comes: an error with the last one and `story`, what there is."""
    begun, pause = time.monotonic(), threading.Event()
    looked = begun
    while not (value := look()):
        now = time.monotonic()
        assert now < begun + seconds, f"after {seconds} s still {value!r}: {what or look}\n{story()}"
        pause.wait(min(max(LOOK_SECONDS, LOOK_SHARE * (now - looked)), MOST_SECONDS))
        looked = time.monotonic()
    return value
