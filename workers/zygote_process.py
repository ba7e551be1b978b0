"""The owner's side of a zygote: start it, ask whether it answers, end it. It dies with its owner, by a kill pipe."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workers.kill_pipe import open_kill_pipe
from workers.zygote import MESSAGE_BYTES, zygote_environment

SOCKET_PATH_BYTES = 107
LOG_FILE = "zygote.log"
LAST_WORDS = 2000


class ZygoteFailed(Exception):
    """The zygote did not come up; the message has its last words."""


class ZygoteProcess:
    """A zygote in a folder of its own, started by this process. Raises ZygoteFailed for a folder with a long path."""

    def __init__(
        self,
        folder: Path,
        entry: str,
        preload: Sequence[str],
        environment: Mapping[str, str],
        path: Sequence[str] = (),
        niceness: int = 0,
    ) -> None:
        """Start it; it answers some seconds later.

        Args:
            entry: module:function that a fork runs.
            preload: modules to import before the first fork.
            path: further folders on its import path, after that of this code.
            niceness: how far it and its forks stand back.
        """
        self.socket_path = str(folder / f"zygote-{os.getpid()}.sock")
        if len(self.socket_path.encode()) > SOCKET_PATH_BYTES:
            raise ZygoteFailed(f"socket path {self.socket_path} is longer than {SOCKET_PATH_BYTES} bytes")
        self.came_up = False  # for its owner to note
        self._log = folder / LOG_FILE
        self._pipe = open_kill_pipe()
        command = ["nice", "-n", str(niceness)] if niceness else []
        command += [sys.executable, "-P", "-m", "workers.zygote", "--socket", self.socket_path]
        command += ["--kill-fd", str(self._pipe.reader), "--entry", entry, "--preload", ",".join(preload)]
        code = str(Path(__file__).resolve().parents[1])
        folders = [code, *path, *filter(None, [environment.get("PYTHONPATH")])]
        with self._log.open("wb") as output:
            self._child = subprocess.Popen(
                command, pass_fds=[self._pipe.reader], start_new_session=True, cwd=folder,
                env=zygote_environment({**environment, "PYTHONPATH": os.pathsep.join(folders)}),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        os.close(self._pipe.reader)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._child.pid

    def ended(self) -> bool:
        """Whether it is gone, by whatever end."""
        return self._child.poll() is not None

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """What it says of itself (see `zygote`), None when it does not in time."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(seconds)
            try:
                connection.connect(self.socket_path)
                connection.send(b'{"op": "ping"}')
                said = connection.recv(MESSAGE_BYTES)
                return dict(json.loads(said)) if said else None
            except (OSError, ValueError):
                return None

    def last_words(self) -> str:
        """The end of what it has printed."""
        return self._log.read_text(errors="replace")[-LAST_WORDS:]

    def end(self) -> None:
        """End it now, and be rid of it. Its forks live on: each hangs on its own owner."""
        os.close(self._pipe.writer)
        self._child.kill()
        self._child.wait()
