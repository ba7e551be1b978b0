"""What forks of the zygote run in tests: `run` does what its order file says."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(order_file: str, listen_fd: int | None) -> int | None:
    """The entry; the order is a JSON object with an `act`."""
    order: dict[str, Any] = json.loads(Path(order_file).read_text())
    return ACTS[order["act"]](order, listen_fd)  # type: ignore[no-any-return, operator]


def tell(order: dict[str, Any], listen_fd: int | None) -> int:
    """Say what a rank sees of itself."""
    import torch

    facts = {
        "pid": os.getpid(),
        "group": os.getpgrp(),
        "session": os.getsid(0),
        "folder": os.getcwd(),
        "threads": torch.get_num_threads(),
        "environment": os.environ["GIVEN"],
        "listens": listen_fd is not None and os.fstat(listen_fd).st_mode > 0,
        "sum": float(torch.ones(64, 64).sum()),
    }
    print(json.dumps(facts))
    return 0


def fail(order: dict[str, Any], listen_fd: int | None) -> int:
    raise ValueError("scripted mishap")


def leave(order: dict[str, Any], listen_fd: int | None) -> int:
    sys.exit(int(order["code"]))


def stay(order: dict[str, Any], listen_fd: int | None) -> int:
    """Stay, with children: forked and executed, in this group and in sessions of their own."""
    for session in (False, True):
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=session)
        if os.fork() == 0:
            if session:
                os.setsid()
            signal.pause()
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1}:
        signal.signal(number, signal.SIG_IGN)
    Path(order["ready"]).touch()
    if order.get("in_c"):
        ctypes.PyDLL(None).pause()  # holds the interpreter's lock: no Python code runs any more
    while True:
        signal.pause()


ACTS = {"tell": tell, "fail": fail, "leave": leave, "stay": stay}
