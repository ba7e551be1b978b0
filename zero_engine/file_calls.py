"""The calls to the kernel that a disk answers. Torch-free."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from pathlib import Path


class FileCalls:
    """One method for each, so that a test can die at each or answer itself."""

    write_bytes = 4 * 2**20  # of one write of a large object: pages of 4 KiB; tests take less, to die in the middle
    read_bytes = 2 * 2**20  # of one read past the page cache: pages of 4 KiB; two make a load's memory

    def open(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def begin_sync(self, descriptor: int, offset: int, count: int) -> None:
        """Let the disk start on bytes that were written, and do not wait. A hint: only `sync` makes them durable."""
        if _SYNC_FILE_RANGE is not None:
            _SYNC_FILE_RANGE(descriptor, offset, count, _SYNC_FILE_RANGE_WRITE)

    def read(self, descriptor: int, view: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [view], offset)

    def read_cached(self, descriptor: int, view: memoryview, offset: int) -> int:
        """Some of what the page cache holds. EAGAIN when it holds nothing, EOPNOTSUPP when there is no telling."""
        if _FROM_CACHE is None:
            raise OSError(errno.EOPNOTSUPP, "this system reads from its page cache and from a disk alike")
        return os.preadv(descriptor, [view], offset, _FROM_CACHE)

    def go_direct(self, descriptor: int, direct: bool) -> None:
        """From now on bytes go past the page cache, or no longer. EINVAL where the file system cannot."""
        flags, bit = fcntl.fcntl(descriptor, fcntl.F_GETFL), getattr(os, "O_DIRECT", 0)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | bit if direct else flags & ~bit)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)


_FROM_CACHE: int | None = getattr(os, "RWF_NOWAIT", None)
_SYNC_FILE_RANGE_WRITE = 2
_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux; the standard library has no name for it
if _SYNC_FILE_RANGE is not None:
    _SYNC_FILE_RANGE.argtypes = [ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_uint]
