"""What `serve` refuses before it starts anything: one line each, saying which and what to do."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
from collections import namedtuple
from pathlib import Path

import pytest

from server.claims import CannotServe, claimed, controller_id, listen, migrated
from server.settings import Settings

Usage = namedtuple("Usage", "total used free")


def refused(settings: Settings) -> str:
    with pytest.raises(CannotServe) as caught, claimed(settings, None):
        pass
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_folder_is_made_closed_to_others_and_given_back(tmp_path: Path) -> None:
    """It can be claimed again after the first claim has ended."""
    settings = Settings(data_dir=tmp_path / "new" / "data")
    for _ in range(2):
        with claimed(settings, None):
            assert stat.S_IMODE(settings.data_dir.stat().st_mode) == 0o700
            assert settings.lock_file.read_text() == f"{os.getpid()}\n"


def test_a_folder_in_use_names_the_server_that_holds_it(tmp_path: Path) -> None:
    """The pid stands in the line."""
    settings = Settings(data_dir=tmp_path)
    with claimed(settings, None):
        text = refused(settings)
    assert f"pid {os.getpid()}" in text
    assert "--data-dir" in text


def test_the_two_halves_may_share_a_folder_but_not_a_half(tmp_path: Path) -> None:
    """As compose does with a shared volume."""
    settings = Settings(data_dir=tmp_path)
    both = claimed(settings, "api"), claimed(settings, "controller")
    with both[0], both[1], pytest.raises(CannotServe), claimed(settings, "controller"):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Here: a file stands where the folder should be."""
    (tmp_path / "file").write_text("")
    text = refused(Settings(data_dir=tmp_path / "file" / "data"))
    assert str(tmp_path / "file" / "data") in text
    assert "cannot be written" in text


def test_a_full_disk_is_seen_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its free bytes, and by the error of the first write."""
    settings = Settings(data_dir=tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 90, 10))
    assert "full" in refused(settings)
    monkeypatch.undo()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    assert "full" in refused(settings)


def test_without_a_port_the_next_free_one_is_taken() -> None:
    """From 8470 on, whoever holds the first."""
    first = listen(Settings())
    second = listen(Settings())
    with first, second:
        ports = [first.getsockname()[1], second.getsockname()[1]]
    assert 8470 <= ports[0] < ports[1]


def test_a_given_port_in_use_is_refused_by_number() -> None:
    """Never silently another one."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(CannotServe, match=f"Port {port} is in use"):
            listen(Settings(port=port))


def test_an_address_that_is_not_of_this_machine_is_refused() -> None:
    """Said as such, not as a port in use."""
    with pytest.raises(CannotServe, match="address of this machine"):
        listen(Settings(host="192.0.2.1", port=9))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mongodb://db/x", "'mongodb' is not supported; use sqlite or postgresql"),
        ("no url at all", "Could not parse SQLAlchemy URL"),
        ("postgresql://user:secret@127.0.0.1:9/x", "Connection refused"),
        ("sqlite:///FOLDER/none/x.db", "unable to open database file"),
        ("sqlite:///FOLDER/text.db", "file is not a database"),
    ],
)
async def test_a_database_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, url: str, said: str) -> None:
    """Unknown, unparsable, away, missing, damaged: which, why and what to do, and no password."""
    (tmp_path / "text.db").write_text("this is no database, and it is longer than its header\n" * 100)
    with pytest.raises(CannotServe) as refused:
        await migrated(url.replace("FOLDER", str(tmp_path)))
    line = str(refused.value)
    assert said in line and "--database-url" in line and "\n" not in line and "secret" not in line


def test_the_controller_keeps_its_name_in_its_folder(tmp_path: Path) -> None:
    """So that a restart takes its own lease over without waiting for it to run out."""
    path = tmp_path / "controller-id"
    assert controller_id(path) == controller_id(path)
    assert controller_id(tmp_path / "other") != controller_id(path)
