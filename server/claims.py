"""What `serve` needs before it starts anything: the data folder, the port, the database. Each refusal is one line."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from alembic.util import CommandError
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from server.ids import new_id
from server.migrations import migrate
from server.reasons import one_line
from server.settings import FIRST_PORT, Settings

Half = Literal["api", "controller"]
LEAST_FREE_BYTES = 32 * 2**20  # of the data folder's disk
PORTS_TRIED = 200


class CannotServe(Exception):
    """The service cannot start here; one line that says why and what to do."""


@contextlib.contextmanager
def claimed(settings: Settings, only: Half | None) -> Iterator[None]:
    """Hold the data folder's lock. Raises CannotServe when the folder cannot be used."""
    folder = settings.data_dir
    path = settings.lock_file if only is None else settings.lock_file.with_name(f"lock-{only}")
    try:
        for needed in (folder, settings.cache_dir, settings.ranks_dir, folder / "logs"):
            needed.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        lock = path.open("a+")
    except OSError as error:
        raise CannotServe(_folder_trouble(folder, error)) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = path.read_text().strip() or "another process"
            raise CannotServe(
                f"The data folder {folder} is in use by a server (pid {holder}); stop it or give another --data-dir."
            ) from error
        free = shutil.disk_usage(folder).free
        if free < LEAST_FREE_BYTES:
            raise CannotServe(f"The disk of the data folder {folder} is full ({free} bytes left); free some space.")
        try:
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
        except OSError as error:
            raise CannotServe(_folder_trouble(folder, error)) from error
        yield


def _folder_trouble(folder: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk of the data folder {folder} is full; free some space or give another --data-dir."
    return f"The data folder {folder} cannot be written ({error.strerror}); mend it or give another --data-dir."


def listen(settings: Settings) -> socket.socket:
    """The API's listening socket: the given port, or the first free one from 8470 on. Raises CannotServe."""
    ports = [settings.port] if settings.port is not None else range(FIRST_PORT, FIRST_PORT + PORTS_TRIED)
    for port in ports:
        try:
            return _bind(settings.host, port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise CannotServe(
                    f"Cannot listen on {settings.host} ({error.strerror}); give an address of this machine as --host."
                ) from error
    if settings.port is not None:
        raise CannotServe(f"Port {settings.port} is in use; give another --port, or none for the first free one.")
    raise CannotServe(f"No port from {FIRST_PORT} to {FIRST_PORT + PORTS_TRIED - 1} is free; give one with --port.")


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def controller_id(path: Path) -> str:
    """Who leads from this folder. Its lock is ours, so a lease in this name belongs to a process that has ended."""
    if not path.exists():
        path.write_text(f"{new_id()}\n")
    return path.read_text().strip()


async def migrated(url: str) -> None:
    """Bring the database at `url` up to date. Raises CannotServe when it cannot be reached, read or understood."""
    try:
        await migrate(url)
    except (SQLAlchemyError, CommandError, ValueError, OSError) as error:
        reason = one_line(str(error.orig if isinstance(error, DBAPIError) else error))
        raise CannotServe(
            f"The database {_shown(url)} cannot be used ({reason}); mend it or give another --database-url."
        ) from error


def _shown(url: str) -> str:
    """The URL without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "named"
