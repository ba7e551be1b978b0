"""The local Ray head of `shardyard serve`: started, found again by a restarted server, stopped. Never imports ray.

The head runs in its own session, so that killing the server does not end the jobs. All of it listens on loopback.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from hashlib import blake2s
from pathlib import Path

from workers.process_table import ProcessId, identify, kill_marked, marked, send_signal, wait_gone

HEAD_FILE = "ray-head.json"
TOKEN_FILE = "ray-token"
HEAD_MARK = "SHARDYARD_HEAD"  # in the environment of the head and of everything below it
OBJECT_STORE_BYTES = 80 * 1024 * 1024
START_SECONDS = 60.0
STOP_SECONDS = 15.0
# The command `ray`, in a process that believes grpc to be missing: then it starts no client server (80 MB, a port).
RAY_START = "import sys; sys.modules['grpc'] = None; from ray.scripts.scripts import main; main()"
RAY_FOLDER = "r"  # below ours: Ray opens its temp folder to everybody


class HeadFailed(Exception):
    """The head did not start or did not stop; the message says what to look at."""


@dataclass(frozen=True)
class Head:
    """A running Ray head: where it listens and which process holds it."""

    address: str  # host:port of the GCS
    token_path: str  # file with Ray's auth token, mode 0600
    temp: str  # folder for sockets, closed to others; short, since their paths are limited to 107 bytes
    pid: int  # of `ray start --head --block`
    start_ticks: int
    mark: str  # value of HEAD_MARK in the environment of everything below it
    local: bool = True  # one machine, loopback only

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.start_ticks)

    def alive(self) -> bool:
        """Whether the process that holds the head runs. When a part dies it ends the rest; when it dies Ray does."""
        return self.process.alive()


# Note: RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0
# Ray 2.60 silently replaces a loopback node address by the outward one and listens on all interfaces, unless this
# variable says that clusters are not wanted. It must stand in the environment of the head, its workers and each driver
# before ray is imported. It limits Ray to one machine, so only the head of our own sets it.
def ray_environment(token_path: str, local: bool) -> dict[str, str]:
    """Variables that the head, its workers and every driver need before they import ray."""
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": token_path,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # an actor without GPUs sees none
        "RAY_DEDUP_LOGS": "0",
    }
    if local:
        settings["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        settings["RAY_gcs_rpc_server_reconnect_timeout_s"] = "10"  # a dead GCS of ours never comes back
    return settings


def _head_environment(token_path: str, mark: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    code = str(Path(__file__).resolve().parents[2])  # workers import `workers` from where the server did
    return (
        environment
        | ray_environment(token_path, local=True)
        | {
            HEAD_MARK: mark,
            "RAY_memory_monitor_refresh_ms": "0",  # it would kill actors for their ranks' bytes
            "RAY_num_workers_soft_limit": "12",  # idle workers stay warm
            "RAY_worker_niceness": "0",  # Ray would give ranks, their actors and the zygote the leftovers (15)
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # else SIGTERM waits for the detached actors
            "PYTHONPATH": os.pathsep.join([code, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
        }
    )


def start_head(folder: Path, slots: int, gpus: int | None = None) -> Head:
    """The head of this data folder: the one that runs already, or a new one with `slots` CPU slots.

    Args:
        folder: the data folder; holds the token and HEAD_FILE.
        slots: CPU ranks that this machine may hold at once.
        gpus: number of GPUs; None lets Ray count.

    Raises HeadFailed with the end of Ray's output when it does not come up.
    """
    found = find_head(folder)
    if found is not None:
        return found
    token_path = _token(folder)
    temp = _temp_folder(folder)
    mark = _mark(folder)
    kill_marked({HEAD_MARK: mark})  # what a head left that died without its own clean-up
    for _ in range(3):
        head = _try_start(folder, token_path, temp, mark, slots, gpus)
        if head is not None:
            _write_json(folder / HEAD_FILE, asdict(head))
            return head
    raise HeadFailed(f"Ray did not start; its last words:\n{_tail(folder / 'ray-head.log')}")


def find_head(folder: Path) -> Head | None:
    """The living head of this data folder, None when there is none."""
    try:
        head = Head(**json.loads((folder / HEAD_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return head if head.alive() else None


def stop_head(folder: Path) -> bool:
    """End the head of this data folder and everything below it; False when none ran.

    Raises HeadFailed when some of it survives.
    """
    head = find_head(folder)
    if head is not None:
        send_signal(head.process, signal.SIGTERM)
        wait_gone(head.process, STOP_SECONDS)
    mark = _mark(folder)
    _wait_marked_gone(mark, 3.0)
    try:
        leftovers = kill_marked({HEAD_MARK: mark})
    except TimeoutError as error:
        raise HeadFailed(str(error)) from error
    (folder / HEAD_FILE).unlink(missing_ok=True)
    shutil.rmtree(_temp_path(folder), ignore_errors=True)
    return head is not None or leftovers > 0


def _wait_marked_gone(mark: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(True for _ in marked({HEAD_MARK: mark})):
        time.sleep(0.05)


def _try_start(folder: Path, token_path: str, temp: Path, mark: str, slots: int, gpus: int | None) -> Head | None:
    ports = free_ports(7)
    command = [
        sys.executable, "-c", RAY_START, "start", "--head", "--block", "--node-ip-address=127.0.0.1",
        f"--port={ports[0]}", f"--dashboard-agent-listen-port={ports[1]}", f"--dashboard-agent-grpc-port={ports[2]}",
        f"--runtime-env-agent-port={ports[3]}", f"--metrics-export-port={ports[4]}", "--include-dashboard=false",
        "--include-log-monitor=false", "--no-monitor", "--disable-usage-stats",  # nothing here is scaled by Ray
        f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={temp / RAY_FOLDER}",
        f"--num-cpus={slots}", "--log-color=false",
    ]  # fmt: skip
    if gpus is not None:
        command.append(f"--num-gpus={gpus}")
    metric_ports = {"AUTOSCALER_METRIC_PORT": str(ports[5]), "DASHBOARD_METRIC_PORT": str(ports[6])}
    environment = _head_environment(token_path, mark) | metric_ports
    log = folder / "ray-head.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, start_new_session=True, cwd="/",
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    identity = identify(process.pid)
    if identity is not None and _wait_listening(process, log, ports[0]):
        return Head(f"127.0.0.1:{ports[0]}", token_path, str(temp), identity.pid, identity.start_ticks, mark)
    process.terminate()
    kill_marked({HEAD_MARK: mark})
    process.wait()
    return None


def _wait_listening(process: subprocess.Popen[bytes], log: Path, port: int) -> bool:
    """Wait until the whole node is up: Ray says so in its output, then the port answers."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if b"Ray runtime started" in log.read_bytes():
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return True
        time.sleep(0.02)
    return False


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody holds now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [int(item.getsockname()[1]) for item in sockets]
    finally:
        for item in sockets:
            item.close()


def _token(folder: Path) -> str:
    path = folder / TOKEN_FILE
    if not path.exists():
        draft = folder / f".{TOKEN_FILE}.{os.getpid()}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        draft.replace(path)
    path.chmod(0o600)
    return str(path)


def _mark(folder: Path) -> str:
    return blake2s(str(folder.resolve()).encode(), digest_size=8).hexdigest()


def _temp_path(folder: Path) -> Path:
    return Path(tempfile.gettempdir() if len(tempfile.gettempdir()) <= 12 else "/tmp") / f"sy-{_mark(folder)[:10]}"


def _temp_folder(folder: Path) -> Path:
    """The folder for sockets: short, ours, closed to others. One that somebody else made first is refused."""
    path = _temp_path(folder)
    path.mkdir(mode=0o700, exist_ok=True)
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise HeadFailed(f"{path} belongs to somebody else; remove it")
    path.chmod(0o700)
    return path


def _write_json(path: Path, value: object) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(value))
    draft.replace(path)


def _tail(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[-2000:]
    except OSError:
        return "(no output)"
