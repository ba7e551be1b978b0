"""What /proc says about processes: identity, descent by an environment mark, and an end that hits no stranger.

Standard library only. A pid alone is never trusted: a `ProcessId` carries the start time too, and signals go through
a pidfd.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessId:
    """One process for ever: a reused pid has another start time."""

    pid: int
    start_ticks: int  # clock ticks since boot, field 22 of /proc/<pid>/stat

    def alive(self) -> bool:
        """Whether any thread of this very process still runs (a zombie's do not).

        Asked of a pidfd: the state that /proc shows is the first thread's, which may end before the others.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            return _start_ticks(self.pid) == self.start_ticks and not select.select([descriptor], [], [], 0)[0]
        finally:
            os.close(descriptor)


def _start_ticks(pid: int) -> int | None:
    """When a pid's process started, None when there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything, also spaces and brackets
    return int(fields[19])


def identify(pid: int) -> ProcessId | None:
    """The identity of a running process, None when it is gone."""
    ticks = _start_ticks(pid)
    return None if ticks is None else ProcessId(pid, ticks)


def own_identity() -> ProcessId:
    """The identity of the calling process."""
    me = identify(os.getpid())
    assert me is not None, "/proc is not mounted"
    return me


def marked(mark: Mapping[str, str]) -> Iterator[ProcessId]:
    """Living processes of this user whose first environment holds every NAME=VALUE of the mark; no zombies."""
    wanted = [f"{name}={value}".encode() for name, value in mark.items()]
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile, or another user's
            continue
        if all(item in environment for item in wanted):
            found = identify(int(entry.name))
            if found is not None and found.alive():
                yield found


def send_signal(process: ProcessId, number: int) -> bool:
    """Signal exactly this process; False when it is gone.

    The pidfd is opened before the identity is checked, so no stranger is hit.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not process.alive():
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def wait_gone(process: ProcessId, seconds: float) -> bool:
    """Wait until the process has ended (or is a zombie); False at the time limit."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return True
    try:
        if not process.alive():
            return True
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return bool(ready)
    finally:
        os.close(descriptor)


def kill_marked(mark: Mapping[str, str], seconds: float = 5.0) -> int:
    """SIGKILL every process that carries the mark, until none is left; returns how many were signalled.

    Repeated, since a process may fork while it is looked for. Raises TimeoutError when some survive `seconds`.
    """
    killed: set[ProcessId] = set()
    deadline = time.monotonic() + seconds
    while True:
        found = [process for process in marked(mark) if process.pid != os.getpid()]
        if not found:
            return len(killed)
        for process in found:
            if send_signal(process, signal.SIGKILL):
                killed.add(process)
        for process in found:
            wait_gone(process, 0.2)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {[p.pid for p in found]} with mark {dict(mark)} survive SIGKILL")


def resident_bytes(pid: int) -> int:
    """Resident set size now; 0 when the process is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def proportional_bytes(pid: int) -> int:
    """PSS: resident bytes, each shared page divided by its users; 0 when the process is gone."""
    with contextlib.suppress(OSError, ValueError):
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
