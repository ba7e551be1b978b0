"""Threads that carry messages, where ranks share their cores.

Note: why. A thread that wakes up takes the core from one that computes, since it has had less of it. A thread that
carries messages wakes up for every 64 KB, and with more ranks than cores each time costs two switches and what the
caches held. As a batch thread (Linux, sched(7)) it has the same share of the core and waits for its next turn, when
more bytes are there. Where a core is free nothing changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_THREADS = "/proc/self/task"


@contextmanager
def yielding() -> Iterator[None]:
    """Threads that this process starts meanwhile interrupt no other. Linux only."""
    before = threads()
    yield
    for thread in threads() - before:
        with suppress(OSError):  # it has ended, or may not be changed
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def threads() -> set[int]:
    """Of this process, by kernel number; none where the platform does not list them."""
    return {int(name) for name in os.listdir(_THREADS)} if os.path.isdir(_THREADS) else set()
