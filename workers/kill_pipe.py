"""A pipe whose writer's death kills a process group: no lease, no polling, no cooperation of the one that dies.

Note: how the kill works
The reader's file is given an owner (F_SETOWN, the negative group id), a signal (F_SETSIG, SIGKILL) and O_ASYNC. When
the last writer closes, also because its process was killed, the kernel itself signals the whole group: a rank stuck in
C code dies too. Python's descriptors are not inheritable, so the writer stays in one process as long as that process
only forks to exec. Where a kernel does not do this, `guard` puts a small watcher process into the group that waits for
the same end of file.

Standard library only: the zygote imports it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import time
from dataclasses import dataclass

F_SETSIG = 10  # <asm-generic/fcntl.h>; Python has no name for it


@dataclass(frozen=True)
class KillPipe:
    """Descriptors of both ends; the reader travels to the group, the writer stays with whoever may end it."""

    reader: int
    writer: int


def open_kill_pipe() -> KillPipe:
    """A new pipe, both ends closed on exec."""
    reader, writer = os.pipe()
    return KillPipe(reader, writer)


def guard(reader: int, kernel: bool = True) -> None:
    """Tie the caller's process group to the writer of this pipe. The caller must lead its group and be single-threaded.

    Args:
        reader: stays open for the life of the group.
        kernel: whether the kernel's signal is relied upon (see `kernel_kills`); else a watcher process is forked.
    """
    group = os.getpgrp()
    assert group == os.getpid(), f"process {os.getpid()} does not lead its group {group}"
    if kernel:
        fcntl.fcntl(reader, fcntl.F_SETOWN, -group)
        fcntl.fcntl(reader, F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)
    elif os.fork() == 0:
        _watch(reader, group)
    if _writer_closed(reader):  # it went before the tie was made
        os.killpg(group, signal.SIGKILL)


def _watch(reader: int, group: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while not _writer_closed(reader):
        select.select([reader], [], [])
    os.killpg(group, signal.SIGKILL)  # the watcher is a member and goes with it
    os._exit(0)


def _writer_closed(reader: int) -> bool:
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    return any(event & select.POLLHUP for _, event in poller.poll(0))


def kernel_kills(seconds: float = 2.0) -> bool:
    """Try the pipe on this kernel with a child that only sleeps; False when it survives the writer."""
    pipe = open_kill_pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.close(pipe.writer)
            os.setsid()
            guard(pipe.reader)
            signal.pause()
        os._exit(1)
    os.close(pipe.reader)
    _wait_leader(child, seconds)
    os.close(pipe.writer)
    return _reap(child, seconds)


def _wait_leader(child: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and os.getpgid(child) != child:
        time.sleep(0.002)


def _reap(child: int, seconds: float) -> bool:
    """Whether the child ended by SIGKILL in time; it is ended and collected in any case."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
