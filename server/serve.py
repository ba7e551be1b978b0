"""`shardyard serve`: the API, the controller and, without a named cluster, a Ray head of our own, for one data folder.

Read `claims.py` (the folder, the port), then `Service` (what runs), then `_stop` (Ctrl-C). The head is a process
of its own: killing this one leaves head and jobs alive, and the next start adopts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn

from server import lifespan
from server.app import create_app
from server.auth import RedactTokens, ensure_admin, login_link, read_or_make_token
from server.claims import CannotServe, Half, claimed, controller_id, listen, migrated
from server.controller import ray_driver, ray_head
from server.controller.cluster import Cluster, ClusterUnavailable
from server.controller.fake_cluster import FakeCluster, cpu_node, send_over_http
from server.controller.ray_placement import NAMESPACE
from server.controller.ray_target import RayOptions
from server.controller.reconciler import Reconciler
from server.db import Database
from server.rows import leases
from server.settings import FIRST_PORT, SettingError, Settings, read_settings
from workers.object_store import open_store

log = logging.getLogger("shardyard.serve")

CLOSE_SECONDS = 3  # for open connections, after the jobs have paused
FAKE_MOVE_SECONDS = 0.05
FAKE_REPORT_EVERY = 5  # moves: real ranks do not report every step either


def serve(settings: Settings, only: Half | None = None, say: Callable[[str], None] = print) -> None:
    """Run until Ctrl-C or SIGTERM. Raises CannotServe before anything was started."""
    with claimed(settings, only):
        _log_to_file(settings)
        listener = listen(settings) if only != "controller" else None
        asyncio.run(Service(settings, only, listener, say).run())


class QuietServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the service decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


@dataclass
class Controller:
    """The controller's half while it runs."""

    reconciler: Reconciler
    cluster: Cluster
    stop: asyncio.Event
    loop: asyncio.Task[None]


class Service:
    """One process of the service."""

    def __init__(
        self, settings: Settings, only: Half | None, listener: socket.socket | None, say: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._only = only
        self._listener = listener
        self._say = say
        self._stopping = asyncio.Event()
        self._controller: Controller | None = None
        self._fake_moves = threading.Event()  # set: the simulated ranks stand still

    @property
    def _own_head(self) -> bool:
        return self._only != "api" and not self._settings.ray_address and not self._settings.fake_cluster

    @property
    def _ends_jobs(self) -> bool:
        """The cluster ends with this process; on one that somebody else runs the jobs go on."""
        return self._own_head or self._settings.fake_cluster

    @property
    def _url(self) -> str:
        settings = self._settings
        if settings.public_url:
            return settings.public_url.rstrip("/")
        port = self._listener.getsockname()[1] if self._listener else settings.port or FIRST_PORT
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
        return f"http://{host}:{port}"

    async def run(self) -> None:
        """Start, wait for a signal, stop."""
        self._catch_signals()
        await migrated(self._settings.database)  # before a head of our own is started: nobody would stop it
        database = Database.open(self._settings.database)
        try:
            shared = self._settings.ray_address != ""
            namespace = await _namespace(database) if shared else NAMESPACE
            cluster = self._open_cluster(namespace) if self._only != "api" else None
            await self._run(database, cluster)
        finally:
            await database.close()

    async def _run(self, database: Database, cluster: Cluster | None) -> None:
        api = await self._start_api(database) if self._listener else None
        if cluster is not None:
            self._controller = self._start_controller(database, cluster)
        halves = [half for half in (api and api.task, self._controller and self._controller.loop) if half]
        signalled = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait([signalled, *halves], return_when=asyncio.FIRST_COMPLETED)
            for half in done - {signalled}:
                half.result()  # a half that failed ends the service
        finally:
            signalled.cancel()
            await self._stop(database, api)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._say("Leaving at once; what still runs is adopted by the next start.")
            sys.stdout.flush()
            os._exit(130)
        self._stopping.set()

    # --- the API's half

    async def _start_api(self, database: Database) -> Api:
        settings = self._settings
        token = read_or_make_token(settings.token_file)
        await ensure_admin(database, token)
        app = create_app(settings, database, self._wake)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, timeout_graceful_shutdown=CLOSE_SECONDS, lifespan="on"
        )
        server = QuietServer(config)
        assert self._listener is not None
        task = asyncio.create_task(server.serve(sockets=[self._listener]), name="api")
        settings.port_file.write_text(f"{self._listener.getsockname()[1]}\n")
        self._say(f"Shardyard is at {self._url}")
        self._say(f"Log in:  {login_link(self._url, token)}")
        if self._only is None:
            end = "pauses the jobs and stops the service" if self._ends_jobs else "stops the service; its jobs train on"
            self._say(f"Data in {settings.data_dir}. Ctrl-C {end}.")
        sys.stdout.flush()
        return Api(server, task)

    def _wake(self) -> None:
        if self._controller is not None:
            self._controller.reconciler.wake()

    # --- the controller's half

    def _start_controller(self, database: Database, cluster: Cluster) -> Controller:
        reconciler = Reconciler(
            database,
            cluster,
            self._settings,
            holder=controller_id(self._settings.data_dir / "controller-id"),
            report_url=f"{self._url}/v1/reports",
            open_store=open_store,
        )
        stop = asyncio.Event()
        loop = asyncio.create_task(reconciler.run(stop), name="controller")
        return Controller(reconciler, cluster, stop, loop)

    def _open_cluster(self, namespace: str = NAMESPACE) -> Cluster:
        settings = self._settings
        if settings.fake_cluster:
            return self._fake_cluster()
        options = RayOptions(warm_workers=settings.idle_workers, namespace=namespace)
        if settings.ray_address:
            driver = ray_driver.connect(settings.ray_address, options=options)
        else:
            driver = ray_driver.connect_local(settings.data_dir, settings.cpu_slots_per_node, options=options)
        threading.Thread(target=_connect, args=(driver,), name="connect", daemon=True).start()
        return driver

    def _fake_cluster(self) -> FakeCluster:
        nodes = (cpu_node("fake", self._settings.cpu_slots_per_node),)
        cluster = FakeCluster(nodes, send_over_http, report_every=FAKE_REPORT_EVERY)

        def move() -> None:
            while not self._fake_moves.wait(FAKE_MOVE_SECONDS):
                cluster.advance()

        threading.Thread(target=move, name="fake-ranks", daemon=True).start()
        return cluster

    # --- the end

    async def _stop(self, database: Database, api: Api | None) -> None:
        if self._controller is not None:
            await self._stop_controller(database, self._controller)
        if api is not None:
            api.server.should_exit = True
            with contextlib.suppress(SystemExit):
                await api.task
            self._settings.port_file.unlink(missing_ok=True)
        self._fake_moves.set()
        if self._own_head:
            await asyncio.to_thread(ray_head.stop_head, self._settings.data_dir)
        self._say("Stopped.")

    async def _stop_controller(self, database: Database, controller: Controller) -> None:
        await controller.reconciler.drain()
        if self._ends_jobs:
            await self._pause_jobs(database, controller)
        controller.stop.set()
        await controller.loop
        await controller.reconciler.leadership.release()
        await asyncio.to_thread(controller.cluster.close)

    async def _pause_jobs(self, database: Database, controller: Controller) -> None:
        """The cluster ends with us: its jobs save and pause first."""
        if not await controller.reconciler.leadership.acquire():
            return
        live = await lifespan.pause_live(database, controller.reconciler.leadership)
        controller.reconciler.wake()
        if not live:
            return
        self._say(f"Pausing {len(live)} running job(s); Ctrl-C again leaves at once.")
        patience = max(job.stop_grace_seconds for job in live) + self._settings.shutdown_seconds
        calm = await lifespan.wait_until_calm(database, patience, self._tell_live)
        if not calm:
            self._say(
                "Some jobs did not leave in time; their processes end with the head and they retry at next start."
            )

    def _tell_live(self, live: list[lifespan.StillLive]) -> None:
        for job in live:
            log.info("serve.waiting_for job=%s status=%s step=%d", job.id, job.status, job.step)


async def _namespace(database: Database) -> str:
    """Ray's namespace of this installation on a cluster that others may use too: the same for every server of it."""
    async with database.write() as tx:
        return f"{NAMESPACE}-{await leases.installation(tx)}"


def _connect(driver: ray_driver.RayDriver) -> None:
    """Begin before the first look: a connection takes a second, a new head some more."""
    try:
        driver.open()
    except (ClusterUnavailable, ray_head.HeadFailed) as error:
        log.warning("cluster.not_connected error=%s", error)


@dataclass
class Api:
    """The API's half while it runs."""

    server: uvicorn.Server
    task: asyncio.Task[None]


def _log_to_file(settings: Settings) -> None:
    """Everything to the data folder's log, warnings to the terminal too; never a token."""
    to_file = logging.FileHandler(settings.data_dir / "logs" / "server.log")
    to_terminal = logging.StreamHandler(sys.stderr)
    to_terminal.setLevel(logging.WARNING)
    for handler in (to_file, to_terminal):
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        handler.addFilter(RedactTokens())
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_terminal], force=True)


if __name__ == "__main__":
    try:
        serve(read_settings())
    except (CannotServe, SettingError) as trouble:
        print(trouble, file=sys.stderr)
        sys.exit(2)
