"""A temporary folder that does not outlive its process for long: what a killed one left is removed by the next.

The owner holds a lock on the folder itself, which the kernel drops with the last process that has it open: the owner,
and the ranks that it forked. No process ids are compared, so none can be mistaken for another.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """An empty folder of this process, removed at the end. Folders of `prefix` that nobody holds are removed first."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _remove_left(left)
    folder, held = _make(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _make(prefix: str) -> tuple[Path, int]:
    """A folder and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another run took it for one that was left
            continue
        fcntl.flock(held, fcntl.LOCK_EX)
        if os.fstat(held).st_nlink:
            return folder, held
        os.close(held)  # the same, a moment later


def _remove_left(folder: Path) -> None:
    """Remove a folder unless a living process holds it, or it is somebody else's."""
    try:
        found = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # gone meanwhile, no folder, or another user's
        return
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return  # its process lives
    finally:
        os.close(found)
