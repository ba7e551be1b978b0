"""The owner's side of a fork of a zygote: ask for it, see it end, end it, and say how it ended.

No ray, no torch, no pydantic: it runs in the rank actor, which must stay light.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workers.kill_pipe import open_kill_pipe
from workers.process_table import ProcessId, kill_marked, send_signal
from workers.zygote import MARKS, MESSAGE_BYTES, STACK_FILE, STACK_SIGNAL

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


class ForkedProcess:
    """A fork that this process may end. Losing this object's descriptors, also by being killed, ends it too."""

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
        output: int,
        listener: int | None = None,
    ) -> ForkedProcess:
        """Have the zygote fork a process for this order file, in its folder; what it prints goes to `output`.

        Raises ZygoteGone when nobody answers; then nothing runs, since the only writer of the kill pipe is closed.
        """
        assert set(mark) == set(MARKS), mark
        folder = order.parent
        request = {"op": "fork", "order": str(order), "folder": str(folder), "mark": mark, "environment": environment}
        pipe = open_kill_pipe()
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
        said = json.loads(data)
        identity = ProcessId(said["pid"], said["start_ticks"])
        return cls(_Forked(identity, pidfds[0], pipe.writer, zygote), folder, mark)

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended, until `collect`."""
        return self._pidfd

    def ended(self, seconds: float | None = 0.0) -> bool:
        """Whether the process has ended, waiting at most `seconds` for it; None: as long as it takes."""
        return bool(select.select([self], [], [], seconds)[0])

    def kill(self) -> None:
        """End the whole group at once, and what left the group by its mark. Idempotent; several threads may call it."""
        self._close_pipe()
        kill_marked(self._mark)

    def signal(self, number: int) -> None:
        send_signal(self.identity, number)

    def collect(self) -> ExitStatus:
        """After the end, once: its status, from the zygote when that lives; what it left behind is ended."""
        self._zygote.settimeout(STATUS_SECONDS)
        status = ExitStatus()
        with contextlib.suppress(OSError, ValueError):
            data = self._zygote.recv(MESSAGE_BYTES)
            if data:
                said = json.loads(data)
                status = ExitStatus.of(said["status"], said["peak_rss"])
        self._zygote.close()
        os.close(self._pidfd)
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
