"""`Cluster` for the server: a child process holds the connection to Ray and does what it is told.

Note: why the Ray driver has a process of its own
A process that is connected to Ray is ended by Ray, without a word, when the local node goes away. The API has to work
while Ray is away, so the connection lives in a child; when that dies, the calls say ClusterUnavailable and the next one
starts a new child, on a new head when the cluster is our own. It also keeps ray's memory and threads out of the server.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from server.controller.cluster import ClusterState, ClusterUnavailable, Launch, LaunchFailed, NoCapacity
from server.controller.ray_head import Head, ray_environment, start_head
from server.controller.ray_placement import NAMESPACE
from server.controller.ray_target import USUAL, RayOptions, RayTarget
from workers.contract import AttemptId

CONNECT_SECONDS = 60.0
CALL_SECONDS = 60.0
LAUNCH_SECONDS = 180.0
CLOSE_SECONDS = 5.0
DRIVER_LOG = "ray-driver.log"  # in the data folder


def connect_local(folder: Path, slots: int, gpus: int | None = None, options: RayOptions = USUAL) -> RayDriver:
    """The cluster of one machine: the head of this data folder, started when none runs, also later when it has died."""
    return RayDriver(lambda: _target(start_head(folder, slots, gpus)), options, folder / DRIVER_LOG)


def connect(address: str, token_path: str | None = None, options: RayOptions = USUAL) -> RayDriver:
    """A cluster that somebody else runs; each namespace has agents of its own, and they folders of their own."""
    own = "" if options.namespace == NAMESPACE else f"-{options.namespace.removeprefix(NAMESPACE).strip('-')[:12]}"
    scratch = f"/tmp/sy-node-{os.getuid()}{own}"
    return RayDriver(lambda: RayTarget(address, token_path, False, scratch), options)


def _target(head: Head) -> RayTarget:
    return RayTarget(head.address, head.token_path, head.local, head.temp, head.process)


class RayDriver:
    """`Cluster` by way of a child process. Thread-safe. Nothing is started before the first call or `open`."""

    def __init__(self, locate: Callable[[], RayTarget], options: RayOptions, log: Path | None = None) -> None:
        """`locate` says where the cluster is, each time anew; `log` takes what Ray prints (None: our own output)."""
        self._locate = locate
        self._options = options
        self._log = log
        self._child: _Child | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        """Connect now. Raises ClusterUnavailable; HeadFailed when a head of our own does not start."""
        self._connected()

    def observe(self) -> ClusterState:
        state: ClusterState = self._call("observe", CALL_SECONDS)
        return state

    def launch(self, launch: Launch) -> None:
        self._call("launch", LAUNCH_SECONDS, launch)

    def adopt(self, attempt_id: AttemptId, report_url: str) -> None:
        self._call("adopt", CALL_SECONDS, attempt_id, report_url)

    def request_stop(self, attempt_id: AttemptId) -> None:
        self._call("request_stop", CALL_SECONDS, attempt_id)

    def kill(self, attempt_id: AttemptId) -> None:
        self._call("kill", CALL_SECONDS, attempt_id)

    def stacks(self, attempt_id: AttemptId) -> dict[int, str]:
        """The stacks of every rank's threads now, by rank."""
        stacks: dict[int, str] = self._call("stacks", CALL_SECONDS, attempt_id)
        return stacks

    def release(self, attempt_id: AttemptId) -> None:
        self._call("release", CALL_SECONDS, attempt_id)

    def close(self) -> None:
        with self._lock:
            if self._child is not None:
                self._child.close()
                self._child = None

    @property
    def pid(self) -> int | None:
        """Pid of the child that is connected, None when there is none."""
        return self._child.process.pid if self._child is not None else None

    def _call(self, method: str, seconds: float, *args: Any) -> Any:
        return self._connected().call(method, seconds, *args)

    def _connected(self) -> _Child:
        with self._lock:
            if self._child is not None and not self._child.alive():
                self._child.close()
                self._child = None
            if self._child is None:
                self._child = _Child(self._locate(), self._options, self._log)
            return self._child


class _Child:
    """One driver process and the calls that are under way there."""

    def __init__(self, target: RayTarget, options: RayOptions, log: Path | None) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "server.controller.ray_driver", "--fd", str(theirs.fileno())]
        output = None if log is None else log.open("ab")
        self.process = subprocess.Popen(
            command, env=_driver_environment(target), pass_fds=[theirs.fileno()], start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )  # fmt: skip
        theirs.close()
        if output is not None:
            output.close()
        self._connection = Connection(ours.detach())
        self._holder = target.holder
        self._waiting: dict[int, Future[Any]] = {}
        self._number = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="ray-driver", daemon=True).start()
        try:
            self.call("connect", CONNECT_SECONDS, target, options)
        except ClusterUnavailable:
            self.close()
            raise

    def alive(self) -> bool:
        """Whether it can answer: it runs, and the head of our own that it is connected to does."""
        return self.process.poll() is None and (self._holder is None or self._holder.alive())

    def call(self, method: str, seconds: float, *args: Any) -> Any:
        """The answer of the child; raises what the method raised there, ClusterUnavailable when there is no answer."""
        future: Future[Any] = Future()
        with self._lock:
            self._number += 1
            number = self._number
            self._waiting[number] = future
            try:
                self._connection.send((number, method, args))
            except OSError as error:
                self._waiting.pop(number)
                raise ClusterUnavailable(f"{method}: the Ray driver is gone") from error
        try:
            return future.result(seconds)
        except FutureTimeout as error:
            raise ClusterUnavailable(f"{method}: no answer within {seconds:.0f} s") from error
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        """End the child: it leaves at the end of file."""
        with contextlib.suppress(OSError), self._lock:
            self._connection.send((0, "close", ()))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSE_SECONDS)
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, good, value = self._connection.recv()
                future = self._waiting.get(number)
                if future is not None and not future.done():
                    future.set_result(value) if good else future.set_exception(value)
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(ClusterUnavailable("the Ray driver ended"))


def _driver_environment(target: RayTarget) -> dict[str, str]:
    environment = dict(os.environ)
    if target.token_path is not None:
        environment = {name: value for name, value in environment.items() if not name.startswith("RAY_")}
        environment |= ray_environment(target.token_path, target.local)
    code = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([code, *filter(None, [os.environ.get("PYTHONPATH")])])
    return environment


def serve(connection: Connection) -> None:
    """The child's life: answer numbered calls, several at a time, until the server is gone."""
    lock = threading.Lock()
    cluster: Any = None

    def answer(number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            value, good = getattr(cluster, method)(*args), True
        except Exception as error:
            value, good = _portable(error), False
        with lock, contextlib.suppress(OSError):
            connection.send((number, good, value))

    with ThreadPoolExecutor(8) as pool:
        while True:
            try:
                number, method, args = connection.recv()
            except (EOFError, OSError):
                break
            if method == "close":
                break
            if method == "connect":
                try:
                    cluster = _open(*args)
                    connection.send((number, True, None))
                except Exception as error:
                    connection.send((number, False, _portable(error)))
                continue
            pool.submit(answer, number, method, args)
        os._exit(0)  # calls under way are of no use to anybody; Ray notices by itself


def _open(target: RayTarget, options: RayOptions) -> Any:
    from server.controller.ray_cluster import RayCluster

    return RayCluster(target, options)


def _portable(error: Exception) -> Exception:
    """An exception that the server can read without ray: its own kinds as they are, others as ClusterUnavailable."""
    for kind in (NoCapacity, LaunchFailed):
        if isinstance(error, kind):
            return kind(str(error))
    return ClusterUnavailable(str(error) or type(error).__name__)


def main(arguments: list[str] | None = None) -> None:
    """Run a driver: `python -m server.controller.ray_driver --fd N`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Connection(options.fd))


if __name__ == "__main__":
    # Under its own name, so that what travels is pickled as `server.controller.ray_driver.X` on both sides.
    from server.controller.ray_driver import main as run

    run()
