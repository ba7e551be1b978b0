"""Ends what a test session left behind, however pytest itself ended: `python -m tests.reaper PID TICKS MARK FOLDER...`.

Every process that a test starts inherits the session's mark in its environment, also through Ray, gloo and Chromium.
The reaper waits for pytest's own end, which a pidfd tells after kill -9 too, gives what is left a moment to leave by
itself, kills the rest and removes the session's folders.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time

from tests.session import MARK
from workers.process_table import PROC, ProcessId, kill_marked, marked, wait_gone

GRACE_SECONDS = 10.0  # a pool of ranks sees the end of its pipe, a fork server that of its starter
DAY_SECONDS = 86_400.0


def main(pid: str, start_ticks: str, mark: str, *folders: str) -> None:
    """Wait for the end of pytest, then leave nothing of it."""
    while not wait_gone(ProcessId(int(pid), int(start_ticks)), DAY_SECONDS):
        pass
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(True for _ in marked({MARK: mark})):
        time.sleep(0.05)
    for process in marked({MARK: mark}):
        with contextlib.suppress(OSError):  # it ended meanwhile
            words = (PROC / str(process.pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            print(f"left behind by the tests, ended now: {process.pid} {words[:150]}", file=sys.stderr)
    kill_marked({MARK: mark}, 30.0)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
