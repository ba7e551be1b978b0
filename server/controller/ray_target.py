"""Which Ray cluster, and what runs there: plain values for both sides of the driver's pipe."""

from __future__ import annotations

from dataclasses import dataclass

from server.controller.ray_placement import NAMESPACE
from workers.process_table import ProcessId


@dataclass(frozen=True)
class RayTarget:
    """A cluster to connect to."""

    address: str  # host:port of the GCS
    token_path: str | None  # Ray's token file; None: as the environment says
    local: bool  # our own head, loopback only
    scratch: str  # short folder on every node for the agents' sockets and registers
    holder: ProcessId | None = None  # the process that holds our own head


@dataclass(frozen=True)
class RayOptions:
    """What to run there; the defaults are right but for tests."""

    entry: str = "workers.rank_entry:start"  # module:function that a rank process runs
    preload: str = "workers.rank"  # modules that the zygote imports, comma separated
    warm_workers: int = 4  # idle Ray workers kept ready per node
    path: tuple[str, ...] = ()  # further folders on the ranks' import path
    namespace: str = NAMESPACE  # Ray's: installations on one cluster see neither each other's actors nor groups


USUAL = RayOptions()
