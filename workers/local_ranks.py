"""N rank processes on this machine without a service: forked from this one, tied to its life, read by their spools.

Note: why a fork. The parent has torch imported once; each rank starts in milliseconds and shares those pages. It must
not start threads before, and none of its own afterwards matters to the ranks.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from workers.contract import ORDER_FILE, OUTPUT_FILE, RECORD, SPOOL_FILE, STOP_FILE, LaunchOrder, Record, ResultRecord
from workers.kill_pipe import guard, open_kill_pipe

RankMain = Callable[[LaunchOrder, int | None], int]
POLL_SECONDS = 0.05
LEAVE_SECONDS = 10.0  # for the others to end by themselves when one rank has failed


@dataclass
class _Lines:
    """Complete lines appended to a file since the last look."""

    path: Path
    offset: int = 0

    def new(self) -> list[bytes]:
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self.offset += end
        return data[:end].splitlines()


@dataclass
class _Child:
    rank: int
    pid: int
    pidfd: int
    kill_writer: int
    folder: Path
    records: _Lines
    output: _Lines
    status: int | None = None
    result: ResultRecord | None = field(default=None)


class LocalRanks:
    """The processes of one run."""

    def __init__(self, orders: Sequence[LaunchOrder], listener: socket.socket, main: RankMain) -> None:
        self._children: list[_Child] = []
        for order in orders:
            folder = Path(order.rank_folder)
            folder.mkdir(parents=True)
            (folder / ORDER_FILE).write_text(order.model_dump_json())
            self._children.append(self._fork(order, folder, listener if order.rank == 0 else None, main))
        listener.close()

    def _fork(self, order: LaunchOrder, folder: Path, listener: socket.socket | None, main: RankMain) -> _Child:
        pipe = open_kill_pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for writer in [pipe.writer, *(child.kill_writer for child in self._children)]:
                os.close(writer)
            _become_rank(order, folder, pipe.reader, listener, main)
        os.close(pipe.reader)
        lines = _Lines(folder / SPOOL_FILE), _Lines(folder / OUTPUT_FILE)
        return _Child(order.rank, pid, os.pidfd_open(pid), pipe.writer, folder, *lines)

    def records(self) -> Iterator[tuple[int, Record]]:
        """(rank, record) of every rank until all have ended. A rank that fails takes the others with it."""
        patience: float | None = None
        while True:
            running = [child for child in self._children if child.status is None]
            if running:
                select.select([child.pidfd for child in running], [], [], POLL_SECONDS)
            self._reap(running)
            for child in self._children:
                for line in child.records.new():
                    record = RECORD.validate_json(line)
                    if isinstance(record, ResultRecord):
                        child.result = record
                    yield child.rank, record
            if not running:
                return
            if any(child.status not in (None, 0) for child in self._children):
                patience = LEAVE_SECONDS if patience is None else patience - POLL_SECONDS
                if patience <= 0:
                    self.kill()

    def output(self, rank: int) -> list[str]:
        """Lines that a rank printed since the last call."""
        return [line.decode("utf-8", "replace") for line in self._children[rank].output.new()]

    def stop(self) -> None:
        """Ask every rank to save and leave at the next step boundary."""
        for child in self._children:
            (child.folder / STOP_FILE).touch()

    def kill(self) -> None:
        """End every rank and what it started, at once."""
        for child in self._children:
            if child.kill_writer >= 0:
                os.close(child.kill_writer)
                child.kill_writer = -1

    def results(self) -> list[ResultRecord]:
        """How each rank ended; a rank without a word died."""
        return [child.result or _died(child) for child in self._children]

    def _reap(self, running: Sequence[_Child]) -> None:
        for child in running:
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                child.status = status
                os.close(child.pidfd)

    def close(self) -> None:
        """Kill what lives and collect it."""
        self.kill()
        for child in self._children:
            if child.status is None:
                _, child.status = os.waitpid(child.pid, 0)
                os.close(child.pidfd)


def _died(child: _Child) -> ResultRecord:
    from workers.reporter import now

    status = child.status or 0
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    return ResultRecord(at=now(), outcome="died", signal=number, exit_code=code)


def _become_rank(
    order: LaunchOrder, folder: Path, kill_reader: int, listener: socket.socket | None, main: RankMain
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        guard(kill_reader)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(folder / OUTPUT_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, place in ((null, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, place)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, errors="replace", encoding="utf-8")  # type: ignore[union-attr]
        code = main(order, None if listener is None else listener.detach())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def listening_socket() -> socket.socket:
    """A loopback socket that listens on a free port, for rank 0 to serve the rendezvous on."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener


def describe(result: ResultRecord) -> str:
    """How a rank ended, for a person."""
    if result.error is not None:
        return result.error.traceback
    if result.signal is not None:
        return f"killed by {signal.Signals(result.signal).name}"
    return json.dumps({"exit_code": result.exit_code})
