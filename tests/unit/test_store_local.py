"""The local folder as a store: durable, atomic, and honest about what failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zero_engine.fetcher import Part
from zero_engine.file_calls import FileCalls
from zero_engine.store import (
    LocalStore,
    NotFound,
    StoreDenied,
    StoreError,
    StoreFull,
    as_store,
    require_writable,
)


class Counted(FileCalls):
    """Records the calls by name, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sync(self, descriptor: int) -> None:
        self.calls.append("sync")
        super().sync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self.calls.append("rename")
        super().rename(source, target)

    def make_folder(self, path: Path) -> None:
        self.calls.append("make_folder")
        super().make_folder(path)


def test_an_object_is_synced_before_and_after_it_gets_its_name(tmp_path: Path) -> None:
    """Durability: fsync of the data, rename, fsync of the folder; a new folder is synced into its parent."""
    files = Counted()
    LocalStore(tmp_path, files).put("a/b", b"x")
    assert files.calls == ["make_folder", "sync", "sync", "rename", "sync"]


def test_a_full_disk_leaves_the_old_object_and_no_debris(tmp_path: Path) -> None:
    """ENOSPC half-way: the writer raises StoreFull, what had the key stays, the temporary file is gone."""

    class Full(FileCalls):
        def write(self, descriptor: int, data: memoryview) -> int:
            raise OSError(28, "No space left on device")

    LocalStore(tmp_path).put("a/b", b"old")
    with pytest.raises(StoreFull, match="a/b: No space left"):
        LocalStore(tmp_path, Full()).put("a/b", b"new")
    assert LocalStore(tmp_path).get("a/b") == b"old"
    assert os.listdir(tmp_path / "a") == ["b"]


class Small(FileCalls):
    """Counts writes past the page cache, a page each; `refuses` says which ones the kernel does not take."""

    write_bytes = 4096

    def __init__(self, refuses: Callable[[int], bool]) -> None:
        self.refuses, self.direct, self.taken = refuses, False, 0

    def go_direct(self, descriptor: int, direct: bool) -> None:
        self.direct = direct

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.direct and self.refuses(self.taken):
            raise OSError(22, "Invalid argument")
        if self.direct:
            self.taken += 1
        return super().write(descriptor, data[: max(1, len(data) - 7)])  # never all at once


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 12288, 50001])
@pytest.mark.parametrize("refused_from", [0, 3, 10**6])
def test_every_byte_arrives_past_the_page_cache_or_through_it(tmp_path: Path, size: int, refused_from: int) -> None:
    """Any size, in pieces of any size from memory that changes afterwards, short writes, a refusal at once or later."""
    data, piece = os.urandom(size), bytearray(1000)
    files = Small(lambda taken: taken >= refused_from)
    with LocalStore(tmp_path, files).create("a") as writer:
        for start in range(0, size, len(piece)):
            part = data[start : start + len(piece)]
            piece[: len(part)] = part
            writer.write(memoryview(piece)[: len(part)])
    assert LocalStore(tmp_path).get("a") == data
    assert (files.taken > 0) == (size >= 4096 and refused_from > 0)


def test_a_write_that_fails_behind_the_writers_back_is_its_error(tmp_path: Path) -> None:
    """The disk fills up while the next bytes are gathered: the object does not appear, and nothing of it is left."""

    class Full(FileCalls):
        write_bytes = 4096

        def write(self, descriptor: int, data: memoryview) -> int:
            raise OSError(28, "No space left on device")

    for size in (4096, 100_000):
        with pytest.raises(StoreFull, match="a: No space left"):
            LocalStore(tmp_path, Full()).put("a", bytes(size))
    assert os.listdir(tmp_path) == []


class Cold(FileCalls):
    """A page cache that holds the first bytes and a disk that gives a page at a time; both give fewer than asked."""

    read_bytes = 8192

    def __init__(self, cached: int, refuses: bool, reads: int) -> None:
        self.cached, self.refuses, self.reads = cached, refuses, reads
        self.direct, self.past = False, 0

    def go_direct(self, descriptor: int, direct: bool) -> None:
        if direct and self.refuses:
            raise OSError(22, "Invalid argument")
        self.direct = direct

    def read_cached(self, descriptor: int, view: memoryview, offset: int) -> int:
        if self.cached < 0:
            raise OSError(95, "Operation not supported")
        if offset >= self.cached:
            raise BlockingIOError
        return os.preadv(descriptor, [view[: min(1000, self.cached - offset)]], offset)

    def read(self, descriptor: int, view: memoryview, offset: int) -> int:
        if self.direct:
            self.past += 1
            if self.past > self.reads or offset % 4096 or len(view) % 4096:
                raise OSError(22, "Invalid argument")
        return os.preadv(descriptor, [view[:4096]], offset)


@pytest.mark.parametrize("cached", [-1, 0, 5000, 10**6])
@pytest.mark.parametrize("reads", [0, 3, 10**6])
@pytest.mark.parametrize("refuses", [False, True])
def test_every_byte_is_fetched_past_the_page_cache_or_from_it(
    tmp_path: Path, cached: int, reads: int, refuses: bool
) -> None:
    """Parts of any size at any place, with gaps, into memory used again; refused at once, later or never."""
    data, scratch, seen = os.urandom(50_001), memoryview(bytearray(9000)), list[bytes]()
    LocalStore(tmp_path).put("a", data)
    places = [(64, 1), (65, 4096), (4500, 9000), (13_500, 20), (30_000, 3), (30_003, 8189), (49_000, 1001)]
    parts = [Part(offset, scratch[:count]) for offset, count in places]
    files = Cold(cached, refuses, reads)
    LocalStore(tmp_path, files).read_parts("a", parts, lambda number: seen.append(bytes(parts[number].buffer)), True)
    assert seen == [data[offset : offset + count] for offset, count in places]
    assert (files.past > 0) == (0 <= cached < 50_001 and not refuses)
    assert files.past < 3 or files.direct == (reads > 3), "every read is a whole number of disk blocks"


def test_a_file_cut_short_is_never_padded(tmp_path: Path) -> None:
    """Whatever way its bytes take, a part beyond the end is an error that says where the end is."""
    LocalStore(tmp_path).put("a", bytes(10_000))
    for cached in (-1, 0, 10_000):
        store = LocalStore(tmp_path, Cold(cached, False, 10**6))
        parts = [Part(0, memoryview(bytearray(9_000))), Part(9_000, memoryview(bytearray(1_001)))]
        done = list[int]()
        with pytest.raises(StoreError, match="a: truncated: it ends at byte 10000, 10001 are needed"):
            store.read_parts("a", parts, done.append, alone=True)
        assert 1 not in done


def test_a_failing_fsync_publishes_nothing(tmp_path: Path) -> None:
    """An fsync that fails means that the bytes may be lost: the object does not appear."""

    class Broken(FileCalls):
        def sync(self, descriptor: int) -> None:
            raise OSError(5, "Input/output error")

    (tmp_path / "a").mkdir()
    with pytest.raises(StoreError, match="a/b: Input/output error"):
        LocalStore(tmp_path, Broken()).put("a/b", b"new")
    assert os.listdir(tmp_path / "a") == []


def test_a_read_only_store_says_so(tmp_path: Path) -> None:
    """EROFS and EACCES are one kind, so that the message can say what to do."""

    class ReadOnly(FileCalls):
        def open(self, path: Path) -> int:
            raise OSError(30, "Read-only file system")

    store = LocalStore(tmp_path, ReadOnly())
    with pytest.raises(StoreDenied, match="Read-only"):
        store.put("b", b"new")
    with pytest.raises(StoreDenied, match=f"Read-only.*: let this user write to {tmp_path}, or name another place"):
        require_writable(store)


def test_a_store_that_can_be_written_is_as_it_was_after_the_probe(tmp_path: Path) -> None:
    """Its folder is made, nothing is in it; one that is full is none that refuses: room may be made before a save."""

    class Full(FileCalls):
        def open(self, path: Path) -> int:
            raise OSError(28, "No space left on device")

    require_writable(LocalStore(tmp_path / "new" / "store"))
    assert list((tmp_path / "new" / "store").iterdir()) == []
    require_writable(LocalStore(tmp_path, Full()))


def test_a_file_size_limit_is_a_full_store(tmp_path: Path) -> None:
    """A quota in the kernel (RLIMIT_FSIZE) ends like a full disk."""
    program = f"""
import resource
from zero_engine.store import LocalStore, StoreFull
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    LocalStore({str(tmp_path)!r}).put("a/b", bytes(8192))
except StoreFull:
    print("full")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "full"
    assert list(LocalStore(tmp_path).list()) == []


def test_a_writer_killed_half_way_leaves_an_unlisted_file_that_can_be_removed(tmp_path: Path) -> None:
    """kill -9 between write and rename: no object, and delete_unfinished takes the rest away."""
    program = f"""
import os, signal
from zero_engine.file_calls import FileCalls
from zero_engine.store import LocalStore
class Dies(FileCalls):
    def rename(self, source, target):
        os.kill(os.getpid(), signal.SIGKILL)
LocalStore({str(tmp_path)!r}, Dies()).put("a/b", b"x")
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    store = LocalStore(tmp_path)
    assert list(store.list()) == [] and len(os.listdir(tmp_path / "a")) == 1
    with pytest.raises(NotFound):
        store.get("a/b")
    store.delete_unfinished("a/")
    assert os.listdir(tmp_path) == []


def test_a_path_is_a_store(tmp_path: Path) -> None:
    """Wherever a store is wanted, a folder will do."""
    store = LocalStore(tmp_path)
    assert as_store(store) is store
    assert as_store(str(tmp_path)).url == as_store(tmp_path).url == str(tmp_path)
