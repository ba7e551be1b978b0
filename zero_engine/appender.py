"""Appends to a file past the page cache: two buffers, one filled while the disk takes the other. Torch-free.

Note: why past the page cache, and why from huge pages. A shard that goes through the cache is copied into pages that
must first be found, and written back from there by the kernel's own threads: more processor time than all else that a
save does, and what others read is pushed out. A direct write takes the bytes where they are; but a disk is told of
memory piece by physical piece, so that from ordinary pages of 4 KiB it is given short requests (2 ranks, 1.2 GB:
0.78 s, from huge pages 0.51 s, through the cache 0.67 s or more). State stands in ordinary pages at any address. It is
copied into the buffer while the processor's cache still holds it, since it was hashed just before.
"""

from __future__ import annotations

import errno
from concurrent.futures import Future, ThreadPoolExecutor

from zero_engine.file_calls import FileCalls
from zero_engine.pages import large_pages


class Appender:
    """Bytes on their way into one open file. Every method raises OSError, also for an earlier write that failed."""

    def __init__(self, descriptor: int, files: FileCalls) -> None:
        self._descriptor, self._files = descriptor, files
        self._half_bytes = files.write_bytes
        self._halves = memoryview(large_pages(2 * self._half_bytes))
        self._number = self._filled = 0  # of the half that is being filled, and bytes in it
        self._written = 0  # bytes
        self._direct = False
        self._pen: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    def append(self, data: memoryview) -> None:
        """Take 1-D bytes, which may change when this returns."""
        while len(data):
            part = data[: self._half_bytes - self._filled]
            start = self._number * self._half_bytes + self._filled
            self._halves[start : start + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == self._half_bytes:
                self._hand_over()

    def finish(self) -> None:
        """All bytes are in the file; not yet durable."""
        self._settle()
        self._go_direct(False)  # the last bytes are no whole pages
        self._write(self._half())

    def stop(self) -> None:
        """No write is under way afterwards."""
        if self._pen is not None:
            self._pen.shutdown()

    def _hand_over(self) -> None:
        """The full half goes to the disk, the other one is free."""
        self._settle()
        if self._pen is None:
            self._pen = ThreadPoolExecutor(1, "shardyard-pen")
            self._go_direct(True)
        self._under_way = self._pen.submit(self._write, self._half())
        self._number, self._filled = 1 - self._number, 0

    def _half(self) -> memoryview:
        """What is filled."""
        start = self._number * self._half_bytes
        return self._halves[start : start + self._filled]

    def _settle(self) -> None:
        """The write under way has ended."""
        if self._under_way is not None:
            self._under_way.result()

    def _write(self, view: memoryview) -> None:
        start = self._written
        while len(view):
            try:
                count = self._files.write(self._descriptor, view)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._go_direct(False)  # the place is no multiple of what this disk wants, as after a short write
                continue
            view = view[count:]
            self._written += count
        if not self._direct:
            self._files.begin_sync(self._descriptor, start, self._written - start)

    def _go_direct(self, direct: bool) -> None:
        """Past the page cache, where the file system can."""
        if direct == self._direct:
            return
        try:
            self._files.go_direct(self._descriptor, direct)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
        else:
            self._direct = direct
