"""How a machine becomes part of a cluster of several: the `ray start` line and its environment. Pure; runs nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OBJECT_STORE_BYTES = 80 * 1024 * 1024  # nothing of ours travels through it


@dataclass(frozen=True)
class NodeOrder:
    """What this machine shall be. Exactly one of `head` and `address` is set."""

    head: bool
    address: str | None  # host:port of the head to join
    port: int  # of the head, when this is it
    slots: int  # CPU ranks it may hold
    gpus: int | None  # None: Ray counts
    own_address: str | None  # None: Ray finds it


def node_command(order: NodeOrder) -> list[str]:
    """The command that starts Ray on this machine and stays in the foreground."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--disable-usage-stats",
        f"--num-cpus={order.slots}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--include-log-monitor=false",
    ]
    if order.gpus is not None:
        command.append(f"--num-gpus={order.gpus}")
    if order.own_address is not None:
        command.append(f"--node-ip-address={order.own_address}")
    if order.head:
        return [*command, "--head", f"--port={order.port}", "--include-dashboard=false"]
    return [*command, f"--address={order.address}"]


def node_environment(given: Mapping[str, str], ray: Mapping[str, str], token_file: Path | None) -> dict[str, str]:
    """The environment of that command: what the machine has, without its RAY_ variables, and ours.

    The token of the cluster is RAY_AUTH_TOKEN if the machine has it, else what stands in `token_file`.
    """
    kept = {name: value for name, value in given.items() if not name.startswith("RAY_") or name == "RAY_AUTH_TOKEN"}
    ours = {name: value for name, value in ray.items() if name != "RAY_AUTH_TOKEN_PATH"}
    if "RAY_AUTH_TOKEN" not in kept and token_file is not None:
        ours["RAY_AUTH_TOKEN_PATH"] = str(token_file)
    return {
        **kept,
        **ours,
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_num_workers_soft_limit": "12",
        "OMP_NUM_THREADS": "1",
    }
