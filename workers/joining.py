"""How a rank finds the others: the store that rank 0 serves on a socket it was handed, then the process group."""

from __future__ import annotations

import ipaddress
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from workers.contract import LaunchOrder

JOIN_SECONDS = 300.0  # for all ranks to appear
EXCHANGE_SECONDS = 1800.0  # for the slowest rank to reach an exchange


class RendezvousError(Exception):
    """The ranks did not find each other."""


def join_group(order: LaunchOrder, listen_fd: int | None) -> None:
    """Make the default process group: gloo for CPU ranks (on the loopback interface for one node), NCCL for CUDA.

    `listen_fd`: rank 0's listening socket. Raises RendezvousError.
    """
    if order.device == "cpu" and _is_loopback(order.master_addr):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            order.master_addr,
            order.master_port,
            order.world_size,
            is_master=order.rank == 0,
            timeout=timedelta(seconds=JOIN_SECONDS),
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
        dist.init_process_group(
            "nccl" if order.device == "cuda" else "gloo",
            store=store,
            rank=order.rank,
            world_size=order.world_size,
            timeout=timedelta(seconds=EXCHANGE_SECONDS),
            device_id=device_of(order) if order.device == "cuda" else None,
        )
    except (RuntimeError, OSError, ValueError) as error:
        raise RendezvousError(f"rank {order.rank} did not find its group at {order.master_addr}: {error}") from error


def device_of(order: LaunchOrder) -> torch.device:
    """The device of a rank. A rank that sees one GPU takes it; one that sees several takes its own by number."""
    if order.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", order.rank % max(1, torch.cuda.device_count()))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
