"""The agent of a node: owns the zygote, sends what dead actors' ranks left, ends what an attempt left behind.

One detached Ray actor per node, made by the server (`ray_agents.py`); a plain class here. Its death ends the zygote
(they are tied by a kill pipe) but no attempt: ranks hang on their own actors. Its successor finds everything in the
node folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
import time
from dataclasses import asdict, dataclass
from hashlib import blake2s
from pathlib import Path
from typing import Any

from workers.forked_process import ExitStatus
from workers.gpus import gpus
from workers.launch_register import Entry, Register
from workers.process_table import kill_marked, own_identity, wait_gone
from workers.rank_folders import mark_released, prune
from workers.rank_process import RESULT_FILE, end_of
from workers.spool_progress import SpoolProgress
from workers.spool_sender import SPOOL_FILE, Origin, ReportPost, SpoolSender
from workers.zygote_process import ZygoteFailed, ZygoteProcess

READY_SECONDS = 120.0
PATIENCE_SECONDS = 15.0  # with a zygote that listens but is slow: the machine is busy
PATROL_SECONDS = 0.5
SWEEP_SECONDS = 5.0
WARM_PAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class ZygoteFacts:
    """A zygote that answers."""

    socket_path: str
    pid: int
    start_ticks: int
    kernel_kills: bool  # else ranks are guarded by a watcher process
    seconds: float  # it took to come up
    code: str  # `code_mark` of what it imported


@dataclass(frozen=True)
class AgentPlan:
    """Everything an agent is made with."""

    node_id: str
    raylet: str  # host:port
    scratch: str  # short folder for sockets and the register
    entry: str  # module:function that a rank process runs
    preload: str  # modules that the zygote imports, comma separated
    path: tuple[str, ...] = ()  # further folders on the import path of ranks
    warm_workers: int = 4  # idle Ray workers kept ready


class NodeAgent:
    """Everything of one node that is not a rank."""

    def __init__(self, plan: AgentPlan) -> None:
        self.plan = plan
        self.folder = node_folder(plan.scratch, plan.node_id)
        self.register = Register(self.folder / "ranks")
        self.gpus = gpus()
        self.facts: ZygoteFacts | None = None
        self.failure = ""
        self.lock = threading.Lock()
        self.launched = threading.Event()  # idle workers were used: start others
        self.launched.set()
        self.senders: dict[tuple[str, int], SpoolSender] = {}
        self._zygote: ZygoteProcess | None = None
        threading.Thread(target=self._keep_warm, name="warm", daemon=True).start()
        threading.Thread(target=self._raise_first, name="zygote", daemon=True).start()
        threading.Thread(target=self._patrol, name="patrol", daemon=True).start()

    def ping(self) -> dict[str, Any]:
        """Who this is; `zygote` is None until it answers."""
        facts = self.facts
        return {
            "node_id": self.plan.node_id,
            "actor": asdict(own_identity()),
            "zygote": None if facts is None else asdict(facts),
            "register_folder": str(self.register.folder),
            "devices": tuple(gpu.uuid for gpu in self.gpus),
            "device_memory_bytes": min((gpu.memory_bytes for gpu in self.gpus), default=0),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "failure": self.failure,
        }

    def ensure_zygote(self) -> dict[str, Any]:
        """A zygote that answers and has today's code, made anew when need be: `ping` with `zygote` set.

        Raises ZygoteFailed. Ranks that an older zygote forked live on.
        """
        with self.lock:
            facts, zygote = self.facts, self._zygote
            current = facts is not None and facts.code == code_mark()
            if zygote is None or not current or not zygote.answer(PATIENCE_SECONDS):
                self._end_zygote()
                self.facts = self._start_zygote()
        return self.ping()

    def lost_ranks(self) -> list[dict[str, Any]]:
        """Ranks of this node whose actor is dead: keys as `RankActor.state`, status "exited" or "lost"."""
        return [self._describe(entry) for entry in self.register.entries() if not entry.actor.alive()]

    def redirect(self, attempt_id: str, report_url: str) -> None:
        """Reports of an attempt go there from now on."""
        self.register.redirect(attempt_id, report_url)
        for (attempt, _), sender in list(self.senders.items()):
            if attempt == attempt_id and isinstance(sender.post, ReportPost):
                sender.post.url = report_url

    def sweep(self, attempt_id: str) -> int:
        """After its actors were told to die: end every process of the attempt on this node and forget it.

        Returns how many were ended. Raises TimeoutError when an actor or a process survives.
        """
        for entry in self.register.entries(attempt_id):
            if not wait_gone(entry.actor, SWEEP_SECONDS):
                raise TimeoutError(f"actor {entry.actor.pid} of rank {entry.rank} of attempt {attempt_id} lives on")
        count = kill_marked({"SHARDYARD_ATTEMPT": attempt_id})
        folders = [Path(entry.folder) for entry in self.register.entries(attempt_id)]
        self.register.forget(attempt_id)
        for folder in folders:
            mark_released(folder)
        for ranks in {folder.parent.parent for folder in folders}:
            prune(ranks)
        return count

    def warm(self) -> None:
        """Idle workers were used; start others once the ranks have had their time."""
        self.launched.set()

    def _raise_first(self) -> None:
        try:
            self.ensure_zygote()
        except ZygoteFailed as error:
            self.failure = str(error)

    def _keep_warm(self) -> None:
        """Refill the idle workers after each launch, late enough not to take the ranks' first seconds."""
        from workers.idle_workers import IdleWorkers

        idle = IdleWorkers(self.plan.raylet)
        pause = 0.0
        while self.launched.wait():
            time.sleep(pause)
            pause = WARM_PAUSE_SECONDS
            self.launched.clear()
            try:
                idle.fill(self.plan.warm_workers, READY_SECONDS)
            except Exception as error:  # an internal call of Ray: without it launches are slower, nothing else
                self.failure = f"idle workers are not kept ready: {error}"

    def _start_zygote(self) -> ZygoteFacts:
        begun, code, plan = time.monotonic(), code_mark(), self.plan
        modules = plan.preload.split(",")
        self._zygote = zygote = ZygoteProcess(self.folder, plan.entry, modules, _environment(), plan.path)
        while time.monotonic() - begun < READY_SECONDS and not zygote.ended():
            said = zygote.answer(PATIENCE_SECONDS)
            if said is not None:
                return ZygoteFacts(
                    zygote.socket_path, said["pid"], said["start_ticks"], said["kernel_kills"],
                    time.monotonic() - begun, code,
                )  # fmt: skip
            time.sleep(0.02)
        self._end_zygote()
        raise ZygoteFailed(f"the zygote did not come up:\n{zygote.last_words()}")

    def _end_zygote(self) -> None:
        self.facts = None
        if self._zygote is not None:
            self._zygote.end()
            self._zygote = None

    def _patrol(self) -> None:
        """Keep a zygote standing, and send what the ranks of dead actors left."""
        while True:
            time.sleep(PATROL_SECONDS)
            try:
                self._look_around()
            except Exception as error:  # a full disk, say: shown by ping, tried again at the next look
                self.failure = f"patrol: {type(error).__name__}: {error}"

    def _look_around(self) -> None:
        if self._zygote is not None and self._zygote.ended():
            self._raise_first()
        for entry in list(self.register.entries()):
            if not entry.closed and not entry.actor.alive():
                self._take_over(entry)

    def _take_over(self, entry: Entry) -> None:
        """One try to send an orphaned rank's reports; the rank itself was ended by the kill pipe."""
        key = (entry.attempt_id, entry.rank)
        sender = self.senders.get(key)
        if sender is None:
            kill_marked(entry.mark)
            folder = Path(entry.folder)
            if not (folder / RESULT_FILE).exists():  # else the actor, or the rank, had said how it ended
                end_of(folder, ExitStatus())
            origin = Origin(entry.attempt_id, entry.fence, entry.rank)
            sender = SpoolSender(folder, origin, ReportPost(entry.report_url, entry.report_token))
            sender.ended.set()
            self.senders[key] = sender
        while sender.step() == "applied" and not sender.closed:
            pass
        if sender.closed or sender.given_up:
            self.senders.pop(key)
            self.register.update(*key, closed=True)

    def _describe(self, entry: Entry) -> dict[str, Any]:
        result = None
        with contextlib.suppress(OSError, ValueError):
            result = json.loads((Path(entry.folder) / RESULT_FILE).read_text())
        progress = SpoolProgress(Path(entry.folder) / SPOOL_FILE)
        progress.look()
        return {
            "job_id": entry.job_id,
            "attempt_id": entry.attempt_id,
            "fence": entry.fence,
            "rank": entry.rank,
            "status": "lost" if result is None or result["outcome"] == "died" else "exited",
            "pid": entry.process.pid if entry.process else None,
            "start_ticks": entry.process.start_ticks if entry.process else None,
            "result": result,
            "step": progress.step,
            "heartbeat_age_seconds": 0.0,
            "reports_closed": entry.closed,
        }


def _environment() -> dict[str, str]:
    """The zygote's environment: ours, without what Ray set for its own worker, and with CUDA visible again."""
    dropped = ("CUDA_VISIBLE_DEVICES", "RAY_", "PYTHONBREAKPOINT")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def code_mark() -> str:
    """A short text that changes when the code of ranks on this node's disk does: an upgrade under a running head."""
    root = Path(__file__).resolve().parents[1]
    files = sorted(path for package in ("workers", "zero_engine") for path in (root / package).rglob("*.py"))
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return blake2s(repr(facts).encode(), digest_size=8).hexdigest()


def node_folder(scratch: str, node_id: str) -> Path:
    """The private folder of a node's agent below the short folder `scratch`: sockets, register, zygote log.

    Raises PermissionError when another user made it.
    """
    path = Path(scratch) / f"node-{node_id[:12]}"
    path.mkdir(mode=0o700, exist_ok=True, parents=True)
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to somebody else; remove it")
    path.chmod(0o700)
    return path
