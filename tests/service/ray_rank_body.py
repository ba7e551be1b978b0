"""A rank body for tests of the process path: rendezvous, steps, a stop flag, and scripted mishaps; no engine.

It is what `workers.rank` is to the service, in a hundred lines: the zygote runs `start` in a fork. What goes wrong is
scripted by the spec's tags: `raise:1` (rank 1 raises before the first collective), `deaf:0` (rank 0 ignores every
signal that can be ignored, and the stop flag), `setsid_child` and `forked_child` (each rank leaves a child in a session
of its own), `never_joins:1`, `steps_per_second:20`.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workers.contract import RESULT_FILE, SPOOL_FILE, STOP_FILE, LaunchOrder


class Body:
    """One scripted rank."""

    def __init__(self, order: LaunchOrder, listen_fd: int | None) -> None:
        self.order = order
        self.listen_fd = listen_fd
        self.folder = Path(order.rank_folder)
        self.tags = dict(tag.split(":", 1) if ":" in tag else (tag, "") for tag in order.spec.tags)
        self.step = 0

    def run(self) -> None:
        self.record(kind="phase", phase="started")
        if self.mine("raise"):
            raise ValueError("scripted mishap")
        while self.mine("never_joins"):
            signal.pause()  # a request for its stacks ends one pause
        self.join()
        self.record(kind="phase", phase="training")
        if "setsid_child" in self.tags:
            subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
        if "forked_child" in self.tags and os.fork() == 0:
            os.setsid()
            signal.pause()
        if self.mine("deaf"):
            for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN)
        pause = 1.0 / float(self.tags.get("steps_per_second", "20"))
        for step in range(1, self.order.spec.train.steps + 1):
            self.step = step
            self.record(kind="points", step=step, values={"loss": 1.0 / step})
            print(f"rank {self.order.rank} step {step}")
            if (self.folder / STOP_FILE).exists() and not self.mine("deaf"):
                return self.leave("stopped")
            self.pause(pause)
        self.leave("finished")

    def join(self) -> None:
        import torch.distributed as dist

        order = self.order
        store = dist.TCPStore(
            order.master_addr, order.master_port, order.world_size, order.rank == 0, master_listen_fd=self.listen_fd
        )
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", store=store, rank=order.rank, world_size=order.world_size)
        dist.barrier()

    def pause(self, seconds: float) -> None:
        """The time a step takes."""
        if self.mine("stuck_in_c"):
            ctypes.CDLL(None).pause()  # never returns to Python
        select.select([], [], [], seconds)

    def mine(self, tag: str) -> bool:
        return self.tags.get(tag) == str(self.order.rank)

    def record(self, **fields: Any) -> None:
        with (self.folder / SPOOL_FILE).open("a") as spool:
            spool.write(json.dumps({"at": datetime.now(UTC).isoformat(), **fields}) + "\n")

    def leave(self, outcome: str, **more: Any) -> None:
        result = {"kind": "result", "at": datetime.now(UTC).isoformat(), "outcome": outcome, "step": self.step, **more}
        self.record(**result)
        draft = self.folder / "result.draft"
        draft.write_text(json.dumps(result))
        draft.rename(self.folder / RESULT_FILE)


def start(order_file: str, listen_fd: int | None) -> int:
    """The zygote's entry."""
    order = LaunchOrder.model_validate_json(Path(order_file).read_text())
    body = Body(order, listen_fd)
    try:
        body.run()
    except Exception as error:
        traceback.print_exc()
        info = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        body.leave("failed", error=info)
        return 1
    return 0
