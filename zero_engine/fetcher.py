"""Reads parts of a file: from the page cache what it holds, the rest past it, one half being read while the other is
handed on. Torch-free.

Note: why past the page cache. Bytes on their way through it need pages that must first be found, and in a virtual
machine the first touch of a page that the host had taken back costs more than the disk; nobody reads them again. From
the disk into large pages and on from there, in the processor's cache, two ranks' 1.2 GB take 0.43 s; through the page
cache 0.64 s, or twice that (benchmarks/results/checkpoint.md). A file that several processes read at once goes through
the cache, so that the disk is asked once.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

from zero_engine.file_calls import FileCalls
from zero_engine.pages import large_pages

AHEAD_BYTES = 32 * 2**20  # asked of the disk ahead of time where bytes come through the page cache
DISK_BLOCK = 4096  # bytes: reads past the cache begin and end at multiples of this

Filled = Callable[[int], None]


@dataclass(frozen=True)
class Part:
    """Bytes of an object from `offset` on, as many as the buffer takes."""

    offset: int
    buffer: memoryview  # writable bytes, 1-D


@dataclass(frozen=True)
class _Piece:
    """What one read of the disk gives a part."""

    number: int  # of the part
    offset: int
    buffer: memoryview
    last: bool  # of its part

    @property
    def stop(self) -> int:
        return self.offset + len(self.buffer)


class Fetcher:
    """Reads one open file. Every method raises OSError, ENODATA where the file is too short."""

    def __init__(self, descriptor: int, files: FileCalls) -> None:
        self._descriptor, self._files = descriptor, files
        self._direct = False

    def fetch(self, parts: Sequence[Part], filled: Filled, alone: bool) -> None:
        """Fill the parts in order; `filled` is told the number of each before the next is touched.

        `alone`: no other process reads these bytes now, so that they need not stay in the page cache.
        """
        for number, part in enumerate(parts):
            if alone and not self._from_cache(part):
                if self._go_direct(True):
                    self._past_cache(parts, number, filled)
                    return
                alone = False
            if not alone:
                self._through_cache(part)
            filled(number)

    def _from_cache(self, part: Part) -> bool:
        """Fill a part if all of it is at hand. Where there is no telling, it is read through the cache."""
        done = 0
        while done < len(part.buffer):
            try:
                count = self._files.read_cached(self._descriptor, part.buffer[done:], part.offset + done)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
                self._through_cache(part)
                return True
            if count == 0:
                return False
            done += count
        return True

    def _through_cache(self, part: Part) -> None:
        done, count = 0, len(part.buffer)
        window = (part.offset + count) // AHEAD_BYTES
        if count and part.offset // AHEAD_BYTES != window:
            os.posix_fadvise(self._descriptor, window * AHEAD_BYTES, 2 * AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        while done < count:
            done += self._read(part.buffer[done:], part.offset + done, part.offset + count)

    def _past_cache(self, parts: Sequence[Part], first: int, filled: Filled) -> None:
        """Parts from number `first` on, by way of two buffers in large pages: the disk fills one meanwhile."""
        size = self._files.read_bytes
        memory = memoryview(large_pages(2 * size))
        halves = (memory[:size], memory[size:])
        pieces = _pieces(parts, first, size)
        windows = [list(window) for _, window in groupby(pieces, lambda piece: piece.offset // size)]
        with ThreadPoolExecutor(1, "shardyard-fetch") as hand:
            under_way = deque[Future[int]]()
            for window, half in zip(windows, halves, strict=False):
                under_way.append(hand.submit(self._load, window, half))
            for number, window in enumerate(windows):
                half, start = halves[number % 2], under_way.popleft().result()
                for piece in window:
                    piece.buffer[:] = half[piece.offset - start : piece.stop - start]
                    if piece.last:
                        filled(piece.number)
                if number + 2 < len(windows):
                    under_way.append(hand.submit(self._load, windows[number + 2], half))

    def _load(self, window: Sequence[_Piece], half: memoryview) -> int:
        """Read what the pieces span into the half, in whole blocks of the disk; the place in the file of its start."""
        start = min(piece.offset for piece in window) // DISK_BLOCK * DISK_BLOCK
        stop, done = max(piece.stop for piece in window), 0
        room = half[: -(-(stop - start) // DISK_BLOCK) * DISK_BLOCK]
        while start + done < stop:
            done += self._read(room[done:], start + done, stop)
        return start

    def _read(self, view: memoryview, offset: int, stop: int) -> int:
        """Some bytes from `offset` on, at least one, on the way to `stop`."""
        try:
            count = self._files.read(self._descriptor, view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._go_direct(False)  # the place is no multiple of what this disk wants, as after a short read
            return self._read(view, offset, stop)
        if count == 0:
            raise OSError(errno.ENODATA, f"truncated: it ends at byte {offset}, {stop} are needed")
        return count

    def _go_direct(self, direct: bool) -> bool:
        """Past the page cache, or no longer; False where the file system cannot."""
        try:
            self._files.go_direct(self._descriptor, direct)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        self._direct = direct
        return True


def _pieces(parts: Sequence[Part], first: int, most: int) -> Iterator[_Piece]:
    """The parts from number `first` on, cut where the file reaches a multiple of `most` bytes."""
    for number in range(first, len(parts)):
        part, done = parts[number], 0
        while done < len(part.buffer):
            offset = part.offset + done
            view = part.buffer[done : done + most - offset % most]
            done += len(view)
            yield _Piece(number, offset, view, done == len(part.buffer))
