"""One test session: its folders, and the mark that everything started in it carries. See `reaper.py` for its end."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from workers.process_table import own_identity

ROOT = Path(__file__).resolve().parent.parent
MARK = "TESTS_OF_SHARDYARD"  # environment variable of everything that a test starts
MEMORY = Path("/dev/shm")


@functools.cache
def folder() -> Path:
    """The session's own: with a short path, for sockets, and open, since a database server may run as another user."""
    made = Path(tempfile.mkdtemp(prefix="sy-t-", dir="/tmp"))
    made.chmod(0o755)
    return made


def short_folder(name: str) -> Path:
    """A new folder with a short path."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder()))


@functools.cache
def memory_folder() -> Path:
    """The session's own in memory, where the machine has one."""
    made = (MEMORY if MEMORY.is_dir() else folder()) / f"{folder().name}-memory"
    made.mkdir()
    return made


def watch() -> None:
    """Mark what this process starts from now on, and start the reaper that ends it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts a background job
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what we start must hear a Ctrl-C
    me, mark = own_identity(), folder().name
    environment = dict(os.environ)
    os.environ[MARK] = mark
    subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.reaper",
            str(me.pid),
            str(me.start_ticks),
            mark,
            str(folder()),
            str(memory_folder()),
        ],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for pytest
    )
