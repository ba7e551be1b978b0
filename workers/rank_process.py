"""The owner's side of one rank process: ask the zygote for it, see it end, end it, and say how it ended.

No ray, no torch, no pydantic: it runs in the rank actor, which must stay light.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workers.kill_pipe import open_kill_pipe
from workers.process_table import ProcessId, kill_marked, send_signal
from workers.zygote import MARKS, MESSAGE_BYTES, STACK_FILE, STACK_SIGNAL

OUTPUT_FILE = "output.log"  # contract.OUTPUT_FILE; a test compares them
RESULT_FILE = "result.json"  # contract.RESULT_FILE
SPOOL_FILE = "spool.jsonl"  # contract.SPOOL_FILE
FORK_SECONDS = 10.0
STATUS_SECONDS = 2.0


class ZygoteGone(Exception):
    """The zygote did not answer; the agent makes a new one."""


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended, as the zygote that reaped it says. All None: the zygote was gone too."""

    exit_code: int | None = None
    signal: int | None = None
    peak_rss: int | None = None  # bytes

    @classmethod
    def of(cls, status: int, peak_rss: int) -> ExitStatus:
        if os.WIFSIGNALED(status):
            return cls(None, os.WTERMSIG(status), peak_rss)
        return cls(os.waitstatus_to_exitcode(status), None, peak_rss)


@dataclass(frozen=True)
class _Forked:
    """What a fork leaves with its owner."""

    identity: ProcessId
    pidfd: int
    kill_writer: int
    zygote: socket.socket  # says the status in the end


class RankProcess:
    """A rank process that this process may end. Losing this object's descriptors, also by being killed, ends it too."""

    def __init__(self, forked: _Forked, folder: Path, mark: Mapping[str, str]) -> None:
        self.identity = forked.identity
        self.folder = folder
        self._pidfd = forked.pidfd
        self._kill_writers = [forked.kill_writer]  # popped by the one who closes it
        self._zygote = forked.zygote
        self._mark = mark

    @classmethod
    def fork(
        cls,
        socket_path: str,
        order: Path,
        mark: Mapping[str, str],
        environment: Mapping[str, str],
        listener: int | None,
    ) -> RankProcess:
        """Have the zygote fork a rank for this order file; its output goes to OUTPUT_FILE beside it.

        Raises ZygoteGone when nobody answers; then nothing runs, since the only writer of the kill pipe is closed.
        """
        assert set(mark) == set(MARKS), mark
        folder = order.parent
        request = {"op": "fork", "order": str(order), "folder": str(folder), "mark": mark, "environment": environment}
        pipe = open_kill_pipe()
        output = os.open(folder / OUTPUT_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        zygote = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        zygote.settimeout(FORK_SECONDS)
        try:
            zygote.connect(socket_path)
            passed = [pipe.reader, output] + ([] if listener is None else [listener])
            socket.send_fds(zygote, [json.dumps(request).encode()], passed)
            data, pidfds, _, _ = socket.recv_fds(zygote, MESSAGE_BYTES, 1)
            if not pidfds:
                raise ZygoteGone(f"the zygote at {socket_path} closed the connection")
        except (OSError, ZygoteGone) as error:
            os.close(pipe.writer)
            zygote.close()
            raise ZygoteGone(str(error)) from error
        finally:
            os.close(pipe.reader)
            os.close(output)
        said = json.loads(data)
        identity = ProcessId(said["pid"], said["start_ticks"])
        return cls(_Forked(identity, pidfds[0], pipe.writer, zygote), folder, mark)

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether the process has ended, waiting at most `seconds` for it."""
        return bool(select.select([self._pidfd], [], [], seconds)[0])

    def kill(self) -> None:
        """End the whole group at once, and what left the group by its mark. Idempotent; several threads may call it."""
        self._close_pipe()
        kill_marked(self._mark)

    def signal(self, number: int) -> None:
        send_signal(self.identity, number)

    def collect(self) -> ExitStatus:
        """After the end: its status, from the zygote when that lives; what it left behind is ended."""
        self._zygote.settimeout(STATUS_SECONDS)
        status = ExitStatus()
        with contextlib.suppress(OSError, ValueError):
            data = self._zygote.recv(MESSAGE_BYTES)
            if data:
                said = json.loads(data)
                status = ExitStatus.of(said["status"], said["peak_rss"])
        self._zygote.close()
        self.kill()
        return status

    def stacks(self, seconds: float = 0.5) -> str:
        """The Python stacks of all its threads now; what the kernel says of it when it does not answer."""
        path = self.folder / STACK_FILE
        before = path.stat().st_size if path.exists() else 0
        self.signal(STACK_SIGNAL)
        deadline = time.monotonic() + seconds
        text = ""
        while time.monotonic() < deadline and not text.endswith("\n"):
            time.sleep(0.02)
            if path.exists() and path.stat().st_size > before:
                with path.open(errors="replace") as file:
                    file.seek(before)
                    text = file.read()
        return text or _kernel_view(self.identity.pid)

    def _close_pipe(self) -> None:
        with contextlib.suppress(IndexError):
            os.close(self._kill_writers.pop())


def _kernel_view(pid: int) -> str:
    lines = [f"process {pid} does not answer the stack signal"]
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        lines += [line for line in status if line.startswith(("State:", "SigBlk:", "VmRSS:"))]
        lines.append("wchan: " + Path(f"/proc/{pid}/wchan").read_text())
    return "\n".join(lines) + "\n"


def conclude(folder: Path, status: ExitStatus) -> dict[str, Any]:
    """How the rank in this folder ended, as a ResultRecord.

    The rank's own file decides; exit code, signal and peak memory are added from the zygote. No file means that it
    died: by the signal named, or, when the zygote was gone too, by one that nobody saw.
    """
    path = folder / RESULT_FILE
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError):
        result = {"kind": "result", "at": datetime.now(UTC).isoformat(), "outcome": "died"}
    for name in ("exit_code", "signal", "peak_rss"):
        value = getattr(status, name)
        if value is not None and result.get(name) is None:
            result[name] = value
    if result["outcome"] == "died" and result.get("exit_code") is None and result.get("signal") is None:
        result["signal"] = int(signal.SIGKILL)
    return dict(result)


def end_of(folder: Path, status: ExitStatus) -> dict[str, Any]:
    """`conclude`, kept in RESULT_FILE; a death goes the way of the rank's own records too, since nobody else says so.

    A disk that takes nothing any more does not hide the end.
    """
    result = conclude(folder, status)
    with contextlib.suppress(OSError):
        write_atomically(folder / RESULT_FILE, json.dumps(result))
        if result["outcome"] == "died":
            with (folder / SPOOL_FILE).open("a") as spool:
                spool.write("\n" + json.dumps(result) + "\n")
    return result


def write_atomically(path: Path, text: str) -> None:
    """Replace a small private file as a whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)
