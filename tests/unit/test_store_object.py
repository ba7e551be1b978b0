"""What only an object store has: urls, credentials, and times when it is away."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import pytest
from checkpoint_by_hand import ByHand
from s3_by_hand import S3Server

from tests.waiting import PATIENCE_SECONDS
from workers.object_store import ObjectStore, open_store
from zero_engine.catalog import delete, list_checkpoints, verify
from zero_engine.export import Export
from zero_engine.store import LocalStore, StoreAway, StoreError


@pytest.fixture
def server(missing: Callable[[str], NoReturn]) -> S3Server:
    """An S3 server that is not up yet."""
    try:
        return S3Server.plan()
    except ImportError:
        missing("moto: the S3 store is not tested")


@contextmanager
def refusing(port: int) -> Iterator[threading.Event]:
    """A port that hangs up on everybody; the event says that somebody came."""
    came, leave = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(0.1)

        def hang_up() -> None:
            while not leave.is_set():
                try:
                    listener.accept()[0].close()
                    came.set()
                except TimeoutError:
                    continue

        thread = threading.Thread(target=hang_up)
        thread.start()
        yield came
        leave.set()
        thread.join()


def test_a_checkpoint_lives_in_s3_as_in_a_folder(server: S3Server) -> None:
    """Save, list, verify, export and delete give the same on both stores."""
    with server:
        store = open_store(f"s3://{server.bucket}/job/1")
        manifest = ByHand(store).publish()
        assert [name.folder for name in list_checkpoints(store)] == [manifest.folder]
        assert verify(store, manifest.folder).ok
        assert len(b"".join(Export(store, manifest).pieces())) == Export(store, manifest).num_bytes
        delete(store, manifest.folder)
        assert list(store.list()) == []


def test_a_store_that_comes_back_loses_nothing(server: S3Server) -> None:
    """A put that is refused waits with backoff and succeeds when the store answers again."""
    with server:
        store = open_store(f"s3://{server.bucket}/job")
        server.down()
        with refusing(server.port) as came:
            saving = threading.Thread(target=store.put, args=("a/b", b"x" * 1000))
            saving.start()
            assert came.wait(PATIENCE_SECONDS)
        server.up()
        saving.join(PATIENCE_SECONDS)
        assert store.get("a/b") == b"x" * 1000


def test_a_store_that_stays_away_is_no_damage(server: S3Server) -> None:
    """After the patience it is StoreAway, which never marks a checkpoint as bad."""
    with server:
        store = open_store(f"s3://{server.bucket}/job", patience=timedelta(seconds=1))
        folder = ByHand(store).publish().folder
        server.down()
        for call in (lambda: store.get("a/b"), lambda: store.put("a/b", b"x"), lambda: verify(store, folder)):
            with pytest.raises(StoreAway):
                call()


def test_credentials_are_in_no_message_and_no_url(server: S3Server) -> None:
    """What is shown and stored names the place alone; a url with credentials is refused."""
    with server:
        store = open_store(f"s3://{server.bucket}/job", patience=timedelta(seconds=1))
        assert store.url == f"s3://{server.bucket}/job"
        with pytest.raises(StoreError) as caught:
            store.get("nowhere")
        assert "test-secret" not in f"{caught.value} {store.url} {vars(store)}"
    with pytest.raises(StoreError, match="no credentials"):
        open_store("s3://id:secret@bucket/job")


def test_a_url_names_its_store() -> None:
    """Folders, file urls and s3 urls; anything else is refused with what is possible."""
    assert isinstance(open_store("/tmp/x"), LocalStore)
    assert open_store("file:///tmp/x").url == "/tmp/x"
    assert isinstance(open_store("s3://bucket/x"), ObjectStore)
    for url in ("relative", "gopher://x/y", ""):
        with pytest.raises(StoreError, match="use s3://"):
            open_store(url)
