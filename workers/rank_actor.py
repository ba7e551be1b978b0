"""The Ray actor of one rank: light, without torch. It has the rank forked, and from then on only supervises.

Two threads: one watches the process (its end, its progress, the orphan limit), one sends its reports. The methods are
what the controller calls; each answers at once. A plain class: `ray_cluster.py` makes the actor of it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from workers.forked_process import ForkedProcess
from workers.gpus import device_environment, gpus, visible_devices
from workers.launch_register import Entry, Register, rank_mark
from workers.process_table import own_identity
from workers.rank_process import end_of, fork_rank
from workers.spool_progress import SpoolProgress
from workers.spool_sender import SPOOL_FILE, Origin, ReportPost, SpoolSender

ORDER_FILE = "order.json"  # contract.ORDER_FILE
STOP_FILE = "stop"  # contract.STOP_FILE
WATCH_SECONDS = 0.2
STALE_SECONDS = 5.0  # a kill of a rank that has not moved for so long keeps its stacks in the log
LAST_TRY_SECONDS = 60.0  # an orphan's sender tries so long after the rank's end


@dataclass(frozen=True)
class ActorPlan:
    """Everything an actor is made with."""

    job_id: str
    attempt_id: str
    fence: int
    rank: int
    world_size: int
    report_url: str
    report_token: str
    orphan_seconds: float
    register_folder: str  # of the node agent
    device: str  # "cpu" or "cuda"


@dataclass(frozen=True)
class Address:
    """Where rank 0 listens for the rendezvous."""

    host: str
    port: int


def begin(name: str, work: Callable[..., None], *arguments: Any) -> None:
    """A thread without which an actor supervises nothing: should it fail, the actor ends, its rank with it.

    The controller then sees a lost rank and tries again; a rank that nobody watches would never be seen to end.
    """

    def whole() -> None:
        try:
            work(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=whole, name=name, daemon=True).start()


class RankActor:
    """Supervises one rank of one attempt."""

    def __init__(self, plan: ActorPlan) -> None:
        self.plan = plan
        self.register = Register(Path(plan.register_folder))
        self.post = ReportPost(plan.report_url, plan.report_token)
        self.contact = time.monotonic()  # last sign of a server: a call or an answer
        self.listener: socket.socket | None = None
        self.process: ForkedProcess | None = None
        self.progress: SpoolProgress | None = None
        self.sender: SpoolSender | None = None
        self.folder: Path | None = None
        self.result: dict[str, Any] | None = None
        self.device = ""  # UUID of this rank's GPU
        self.gone = threading.Event()
        self.lock = threading.Lock()

    def bind(self, host: str) -> Address:
        """Rank 0: listen for the rendezvous on a free port of this host. Bound before it is published: no race."""
        self.listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.listener.bind((host, 0))
        self.listener.listen(1024)
        return Address(host, int(self.listener.getsockname()[1]))

    def start(self, order: str, master: Address, zygote: str) -> dict[str, Any]:
        """Have the rank forked from `order` (a LaunchOrder as JSON, its address filled in here). Idempotent.

        Raises ZygoteGone, DeviceMismatch, OSError; then no process runs.
        """
        with self.lock:
            if self.process is None and self.result is None:
                self._start(json.loads(order), master, zygote)
        return self.state()

    def _start(self, order: dict[str, Any], master: Address, zygote: str) -> None:
        known = gpus() if self.plan.device == "cuda" else ()
        environment = device_environment(self.plan.device, visible_devices(), known)
        self.device = environment["CUDA_VISIBLE_DEVICES"]
        order |= {"master_addr": master.host, "master_port": master.port}
        folder = Path(order["rank_folder"])
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / ORDER_FILE).write_text(json.dumps(order))
        plan = self.plan
        entry = Entry(
            plan.job_id, plan.attempt_id, plan.fence, plan.rank, str(folder), self.post.url, plan.report_token,
            own_identity(),
        )  # fmt: skip
        self.register.write(entry)
        descriptor = None if self.listener is None else self.listener.fileno()
        mark = rank_mark(plan.attempt_id, plan.rank)
        self.process = fork_rank(zygote, folder / ORDER_FILE, mark, environment, descriptor)
        self.register.write(replace(entry, process=self.process.identity))
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        self.folder = folder
        self.progress = SpoolProgress(folder / SPOOL_FILE)
        self.sender = SpoolSender(folder, Origin(plan.attempt_id, plan.fence, plan.rank), self.post)
        begin("watch", self._watch)
        begin("reports", self.sender.run, self.gone)

    def state(self) -> dict[str, Any]:
        """Who this is and how the rank fares; keys as the fields of `RankState`, and the fence to check first."""
        self.contact = time.monotonic()
        process, progress = self.process, self.progress
        status = "starting" if process is None else "running" if self.result is None else "exited"
        return {
            "job_id": self.plan.job_id,
            "attempt_id": self.plan.attempt_id,
            "fence": self.plan.fence,
            "rank": self.plan.rank,
            "status": status,
            "pid": process.identity.pid if process else None,
            "start_ticks": process.identity.start_ticks if process else None,
            "result": self.result,
            "step": progress.step if progress else 0,
            "heartbeat_age_seconds": progress.age_seconds() if progress else 0.0,
            "reports_closed": bool(self.sender and (self.sender.closed or self.sender.given_up)),
            "device": self.device,
            "actor": asdict(own_identity()),
        }

    def adopt(self, report_url: str) -> dict[str, Any]:
        """A (new) server listens there from now on."""
        self.post.url = report_url
        if self.process is not None:
            self.register.redirect(self.plan.attempt_id, report_url)
        return self.state()

    def stop(self) -> None:
        """Ask the rank to checkpoint and leave at the next step boundary."""
        self.contact = time.monotonic()
        if self.folder is not None:
            (self.folder / STOP_FILE).touch()

    def kill(self) -> None:
        """End the rank's whole group now; its reports are still sent. A rank that had not moved leaves its stacks."""
        self.contact = time.monotonic()
        process, progress = self.process, self.progress
        if process is None or self.result is not None:
            return
        if progress is not None and progress.idle_seconds() > STALE_SECONDS:
            self._log(process.stacks())
        process.kill()

    def stacks(self) -> str:
        """The Python stacks of the rank's threads now; what the kernel says of it when it does not answer."""
        return "" if self.process is None or self.result is not None else self.process.stacks()

    def _watch(self) -> None:
        """Until the end: follow the progress and the orphan limit. Then say how it ended."""
        process, progress, sender, folder = self.process, self.progress, self.sender, self.folder
        assert process and progress and sender and folder
        while not process.ended(WATCH_SECONDS):
            progress.look()
            if self._orphaned():
                (folder / STOP_FILE).touch()
        self.result = end_of(folder, process.collect())
        progress.look()
        sender.ended.set()
        self._leave_when_orphaned(sender)

    def _orphaned(self) -> bool:
        return time.monotonic() - max(self.contact, self.post.last_answer) > self.plan.orphan_seconds

    def _leave_when_orphaned(self, sender: SpoolSender) -> None:
        """Nobody will release an orphan: after its rank's end and some last tries it goes by itself."""
        while not self.gone.wait(WATCH_SECONDS):
            if self._orphaned():
                self.gone.wait(0.0 if sender.closed else min(LAST_TRY_SECONDS, self.plan.orphan_seconds))
                if self._orphaned():
                    os._exit(0)

    def _log(self, text: str) -> None:
        """Put a text of our own among the rank's output, so that it travels with it."""
        if self.folder is not None and text:
            with (self.folder / "output.log").open("a") as file:
                file.write(f"\n[shardyard: stacks of rank {self.plan.rank}]\n{text}\n")
