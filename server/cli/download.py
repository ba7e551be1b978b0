"""Downloads that leave no half file: one file, or a tar that becomes a folder."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from server.cli.connection import Session
from server.cli.errors import CommandError


def download_file(session: Session, path: str, target: Path, **query: Any) -> int:
    """A file, under its name only when it is whole; returns its bytes. Raises CommandError."""
    part = target.with_name(target.name + ".part")
    count = 0
    try:
        with session.client.bytes_of(path, **query) as (length, pieces), part.open("wb") as file:
            for piece in pieces:
                count += file.write(piece)
        _check(count, length)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return count


def download_folder(session: Session, path: str, target: Path, **query: Any) -> int:
    """The files of a tar as a folder, under its name only when it is whole; returns the bytes read."""
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with session.client.bytes_of(path, **query) as (length, pieces):
            stream = _Stream(pieces)
            part.mkdir(parents=True)
            _unpack(stream, part)
            stream.read_to_end()
        _check(stream.count, length)
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return stream.count


def _unpack(stream: _Stream, folder: Path) -> None:
    """Plain files with plain names; anything else is no export of ours."""
    try:
        with tarfile.open(fileobj=io.BufferedReader(stream), mode="r|") as tar:
            for member in tar:
                if not member.isreg() or Path(member.name).name != member.name:
                    raise CommandError(f"The server sent something else than an export: {member.name!r}.")
                content = tar.extractfile(member)
                assert content is not None, member.name
                with (folder / member.name).open("xb") as file:
                    shutil.copyfileobj(content, file, 1 << 20)
    except tarfile.TarError as error:
        raise CommandError(f"The download cannot be unpacked ({error}); try again.") from error


def _check(count: int, length: int | None) -> None:
    if length is not None and count != length:
        raise CommandError(f"The download ended after {count} of {length} bytes; try again.")


class _Stream(io.RawIOBase):
    """Pieces of a download as a file to read, counted."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest, self.count = pieces, b"", 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill some of `buffer`; 0 at the end."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = piece
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        self.count += count
        return count

    def read_to_end(self) -> None:
        """Take what is left, so that its length is known."""
        self.count += len(self._rest) + sum(len(piece) for piece in self._pieces)
        self._rest = b""
