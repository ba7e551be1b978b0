"""A zygote: one single-threaded process that has torch imported and forks others on request, a node's ranks say.

Importing torch takes seconds, forking a process that has done so takes milliseconds. CUDA is never initialised here,
since a fork could not use it. This file itself needs the standard library only; what is imported before is named by the
caller (`--preload`) and so is the function a fork runs (`--entry module:function`, called with the order file's path
and the listening descriptor or None).

Protocol, over a SOCK_SEQPACKET socket: one JSON object per message.
    {"op": "ping"}                                    -> {"pid", "start_ticks", "kernel_kills", "threads"}
    {"op": "fork", "order", "folder", "mark": {..}, "environment": {..}}
        with descriptors [kill pipe reader, output, listening socket if any]
                                                      -> {"pid", "start_ticks"} with a pidfd
                                                      -> {"status", "peak_rss"} when that process was reaped
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from workers.kill_pipe import guard, kernel_kills
from workers.process_table import identify

MESSAGE_BYTES = 65536
STACK_FILE = "stacks.txt"  # where a rank writes its stacks on STACK_SIGNAL
STACK_SIGNAL = signal.SIGUSR1
MARK_BYTES = 64  # room kept in the first environment for the value of a mark
MARKS = ("SHARDYARD_ATTEMPT", "SHARDYARD_RANK")  # the first is contract.ENVIRONMENT_MARK

Entry = Callable[[str, "int | None"], "int | None"]


@dataclass(frozen=True)
class ForkRequest:
    """What a process is made from."""

    order: str  # path of the order file
    folder: str  # its working directory
    mark: Mapping[str, str]  # names of MARKS
    environment: Mapping[str, str]
    kill_reader: int
    output: int
    listener: int | None

    @classmethod
    def read(cls, message: Mapping[str, Any], descriptors: list[int]) -> ForkRequest:
        kill_reader, output, *rest = descriptors
        return cls(
            message["order"],
            message["folder"],
            message["mark"],
            message["environment"],
            kill_reader,
            output,
            rest[0] if rest else None,
        )

    def close(self) -> None:
        for descriptor in (self.kill_reader, self.output, self.listener):
            if descriptor is not None:
                os.close(descriptor)


class Zygote:
    """The loop: accept, fork, reap. Nothing here may start a thread."""

    def __init__(self, listener: socket.socket, entry: Entry, pipe_works: bool) -> None:
        self.listener = listener
        self.entry = entry
        self.pipe_works = pipe_works
        self.selector = selectors.DefaultSelector()
        self.askers: dict[int, socket.socket] = {}  # pid of a fork -> who asked for it
        self.wake_reader, self.wake_writer = os.pipe()
        for descriptor in (self.wake_reader, self.wake_writer):
            os.set_blocking(descriptor, False)
        self.selector.register(listener, selectors.EVENT_READ, self._accept)
        self.selector.register(self.wake_reader, selectors.EVENT_READ, self._reap)

    def serve(self) -> NoReturn:
        """Answer until killed."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # a fork whose stacks are asked for before it can tell them lives
        signal.set_wakeup_fd(self.wake_writer, warn_on_full_buffer=False)
        while True:
            for key, _ in self.selector.select():
                key.data(key.fileobj)

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            connection.close()
            return
        self.selector.register(connection, selectors.EVENT_READ, self._answer)

    def _answer(self, connection: socket.socket) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._forget(connection)
            return
        message = json.loads(data)
        if message["op"] == "fork":
            self._fork(connection, ForkRequest.read(message, descriptors))
        else:
            self._send(connection, {**_identity(os.getpid()), "kernel_kills": self.pipe_works, "threads": _threads()})

    def _fork(self, connection: socket.socket, request: ForkRequest) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_rank(request)
        request.close()
        self.askers[pid] = connection
        pidfd = os.pidfd_open(pid)
        try:
            socket.send_fds(connection, [json.dumps(_identity(pid)).encode()], [pidfd])
        except OSError:  # who asked is gone already; the kill pipe ends the fork
            self._forget(connection)
        finally:
            os.close(pidfd)

    def _become_rank(self, request: ForkRequest) -> NoReturn:
        code = 1
        try:
            self._close_all()
            enter_rank(request, self.pipe_works)
            code = self.entry(request.order, request.listener) or 0
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _close_all(self) -> None:
        """Let go of everything that is the zygote's, so that its death is seen by those who wait for it."""
        signal.set_wakeup_fd(-1)
        for key in list(self.selector.get_map().values()):
            os.close(key.fd)
        self.selector.close()
        os.close(self.wake_writer)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _reap(self, reader: int) -> None:
        os.read(reader, 4096)
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            connection = self.askers.pop(pid, None)
            if connection is not None:
                self._send(connection, {"status": status, "peak_rss": usage.ru_maxrss * 1024})
                self._forget(connection)

    def _send(self, connection: socket.socket, message: Mapping[str, Any]) -> None:
        try:
            connection.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)
        except OSError:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        if connection.fileno() < 0:
            return
        self.selector.unregister(connection)
        connection.close()
        self.askers = {pid: asker for pid, asker in self.askers.items() if asker is not connection}


def enter_rank(request: ForkRequest, pipe_works: bool) -> None:
    """Turn a fresh fork into a rank: a group of its own, tied to its actor, marked, with its own output and folder."""
    os.setsid()
    guard(request.kill_reader, pipe_works)
    _prefer_for_oom()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(request.output, 1)
    os.dup2(request.output, 2)
    os.close(null)
    os.close(request.output)
    for number, name in ((1, "stdout"), (2, "stderr")):  # made anew: the zygote's may be of a file, and this is a pipe
        stream = open(number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for name, value in request.mark.items():
        stamp_environment(name, value)
    os.environ.update(request.environment)
    os.environ.update(request.mark)
    os.chdir(request.folder)
    stacks = os.open(STACK_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)


def _prefer_for_oom() -> None:
    """Out of memory, the kernel should take a rank and not Ray: raising one's own score needs no right."""
    Path("/proc/self/oom_score_adj").write_text("500")


# Note: why the mark is written over the environment block
# /proc/<pid>/environ shows the bytes that execve laid down, not what setenv did later: a fork would carry the zygote's.
# So the zygote is started with a placeholder of MARK_BYTES, and a fork writes its value over those bytes: it is then
# found by its mark, and so is every child it forks, also one that called setsid. Children that exec get the mark
# through os.environ.
def stamp_environment(name: str, value: str) -> None:
    """Write VALUE over the placeholder of NAME in this process's first environment, where there is one."""
    block = Path("/proc/self/environ").read_bytes()
    offset = (b"\0" + block).find(b"\0" + name.encode() + b"=")
    encoded = value.encode()
    assert len(encoded) <= MARK_BYTES, f"mark {name} of {len(encoded)} bytes; there is room for {MARK_BYTES}"
    if offset < 0:
        return
    stat = Path("/proc/self/stat").read_text()
    start = int(stat[stat.rindex(")") + 2 :].split()[47])  # env_start, field 50
    room = block.index(b"\0", offset) - offset - len(name) - 1
    if room >= len(encoded):
        ctypes.memmove(start + offset + len(name) + 1, encoded.ljust(room, b"\0"), room)


def _identity(pid: int) -> dict[str, int]:
    found = identify(pid)
    return {"pid": pid, "start_ticks": 0 if found is None else found.start_ticks}


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def zygote_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment a zygote must be started with: one thread everywhere, no CUDA by accident, room for the marks."""
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
    placeholders = dict.fromkeys(MARKS, "-" * MARK_BYTES)
    return {**environment, **single, **placeholders, "TOKENIZERS_PARALLELISM": "false"}


def preload(modules: list[str]) -> None:
    """Import what every fork will need; then keep the collector off those objects."""
    for name in modules:
        importlib.import_module(name)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
        assert not torch.cuda.is_initialized(), "a preloaded module initialised CUDA; forks could not use it"
    assert _threads() == 1, f"{_threads()} threads in the zygote; a fork would copy one and lose the others' locks"
    gc.collect()
    gc.freeze()


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a zygote: `python -m workers.zygote --socket PATH --kill-fd N --entry M:F [--preload A,B]`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--kill-fd", type=int, required=True)
    parser.add_argument("--entry", required=True)
    parser.add_argument("--preload", default="")
    options = parser.parse_args(arguments)
    pipe_works = kernel_kills()
    guard(options.kill_fd, pipe_works)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    module, _, function = options.entry.partition(":")
    preload([name for name in options.preload.split(",") if name])
    entry: Entry = getattr(importlib.import_module(module), function)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    Path(options.socket).unlink(missing_ok=True)
    listener.bind(options.socket)
    listener.listen(128)
    Zygote(listener, entry, pipe_works).serve()


if __name__ == "__main__":
    main()
