"""What every store promises; the local folder and object stores pass the same tests."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import NoReturn

import pytest
from s3_by_hand import S3Server

from workers.object_store import open_store
from zero_engine.fetcher import Part
from zero_engine.store import LocalStore, NotFound, Store, StoreError

NUMBERS = count()


@pytest.fixture(scope="module")
def s3(missing: Callable[[str], NoReturn]) -> Iterator[S3Server]:
    """A real S3 server process on loopback."""
    try:
        server = S3Server.plan()
    except ImportError:
        missing("moto[server]: the S3 store is not tested")
    with server:
        yield server


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    if request.param == "local":
        return LocalStore(tmp_path / "store")
    server = request.getfixturevalue("s3")
    return open_store(f"s3://{server.bucket}/run-{next(NUMBERS)}")


def test_what_is_put_is_what_is_read(store: Store) -> None:
    """Bytes come back whole and in ranges, in one way through the object too; a probe leaves nothing."""
    store.probe()
    assert list(store.list()) == []
    data = bytes(range(256)) * 10
    store.put("folder/name", data)
    assert store.get("folder/name") == data
    assert store.size("folder/name") == len(data)
    buffer = bytearray(100)
    store.read_into("folder/name", 1000, memoryview(buffer))
    assert bytes(buffer) == data[1000:1100]
    seen = list[bytes]()
    parts = [Part(offset, memoryview(buffer)[:size]) for offset, size in ((7, 3), (10, 100), (2000, 50))]
    store.read_parts("folder/name", parts, lambda number: seen.append(bytes(parts[number].buffer)), alone=True)
    assert seen == [data[7:10], data[10:110], data[2000:2050]]


def test_an_object_in_pieces_appears_when_its_block_ends(store: Store) -> None:
    """Until the writer commits nobody sees the object."""
    with store.create("a/b") as writer:
        writer.write(b"one")
        writer.write(memoryview(bytearray(b"two")))
        assert list(store.list()) == []
    assert store.get("a/b") == b"onetwo"
    assert list(store.list("a/")) == ["a/b"]


def test_a_buffer_may_be_reused_after_write_returns(store: Store) -> None:
    """A writer keeps no view of the caller's memory."""
    buffer = bytearray(b"x" * 1000)
    with store.create("a/b") as writer:
        writer.write(buffer)
        buffer[:] = b"y" * 1000
    assert store.get("a/b") == b"x" * 1000


def test_an_exception_while_writing_keeps_the_old_object(store: Store) -> None:
    """An abandoned writer leaves nothing and replaces nothing."""
    store.put("a/b", b"old")
    with pytest.raises(RuntimeError), store.create("a/b") as writer:
        writer.write(b"new")
        raise RuntimeError
    assert store.get("a/b") == b"old"
    assert list(store.list()) == ["a/b"]


def test_putting_again_replaces(store: Store) -> None:
    """The last commit wins, whole."""
    store.put("a/b", b"a longer first object")
    store.put("a/b", b"second")
    assert store.get("a/b") == b"second"


def test_an_empty_object_is_an_object(store: Store) -> None:
    """Zero bytes are stored, listed and read."""
    store.put("a/empty", b"")
    assert store.get("a/empty") == b"" and store.size("a/empty") == 0
    store.read_into("a/empty", 0, memoryview(bytearray()))


def test_what_is_not_there_is_not_found(store: Store) -> None:
    """get, size and read_into of an unknown key raise NotFound; deleting it twice is no error."""
    for call in (store.get, store.size):
        with pytest.raises(NotFound, match="nowhere"):
            call("a/nowhere")
    with pytest.raises(NotFound):
        store.read_into("a/nowhere", 0, memoryview(bytearray(1)))
    store.put("a/b", b"x")
    store.delete("a/b")
    store.delete("a/b")
    assert list(store.list()) == []


def test_reading_past_the_end_is_an_error(store: Store) -> None:
    """A truncated object is never padded."""
    store.put("a/b", b"12345")
    with pytest.raises(StoreError):
        store.read_into("a/b", 3, memoryview(bytearray(3)))
    with pytest.raises(StoreError):
        store.read_into("a/b", 10, memoryview(bytearray(3)))


def test_lists_are_by_folder(store: Store) -> None:
    """A prefix is a folder, not the beginning of a name."""
    for key in ("a/1", "a/sub/2", "ab/3", "top"):
        store.put(key, b"x")
    assert sorted(store.list()) == ["a/1", "a/sub/2", "ab/3", "top"]
    assert sorted(store.list("a/")) == ["a/1", "a/sub/2"]
    assert sorted(store.folders()) == ["a", "ab"] and list(store.loose()) == ["top"]
    assert list(store.list("none/")) == []


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/../b", "a/", ".tmp-x", "a/.tmp-x", "a\0b"])
def test_a_key_cannot_leave_the_store(store: Store, key: str) -> None:
    """Absolute, empty and climbing keys are refused."""
    with pytest.raises(StoreError, match="not a key"):
        store.put(key, b"x")


def test_names_in_any_script_are_keys(store: Store) -> None:
    """Keys are text, not ASCII."""
    store.put("文件夹/é ü", b"x")
    assert list(store.list("文件夹/")) == ["文件夹/é ü"]


def test_a_large_object_goes_up_in_parts(store: Store) -> None:
    """More than one part: the bytes are whole, and an abandoned upload leaves nothing."""
    data = bytes(range(256)) * 2**17
    with store.create("a/large") as writer:
        for start in range(0, len(data), 2**22):
            writer.write(memoryview(data)[start : start + 2**22])
    with pytest.raises(RuntimeError), store.create("a/other") as writer:
        writer.write(data)
        raise RuntimeError
    buffer = bytearray(2**21)
    store.read_into("a/large", 2**24 - 2**20, memoryview(buffer))
    assert bytes(buffer) == data[: 2**21] and store.size("a/large") == len(data)
    assert list(store.list("a/")) == ["a/large"]


def test_a_store_can_be_sent_to_another_process(store: Store) -> None:
    """Pickled it is the same place."""
    store.put("a/b", b"x")
    sent = pickle.dumps(store)
    assert pickle.loads(sent).get("a/b") == b"x" and b"test-secret" not in sent
    assert pickle.loads(sent).url == store.url


def test_an_empty_store_lists_nothing(store: Store) -> None:
    """A store that was never written is empty, not an error."""
    assert list(store.list()) == [] and list(store.folders()) == []
