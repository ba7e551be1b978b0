"""Gloo ranks on this machine for a benchmark: one thread each, a process each, ended together."""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(ranks: int, main: Callable[..., None], *given: Any) -> None:
    """`main(rank, *given)` in every rank of a gloo group. Raises SystemExit when one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    processes = [context.Process(target=_rank, args=(rank, ranks, port, main, given)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"a rank failed: {[process.exitcode for process in processes]}")


def _rank(rank: int, ranks: int, port: int, main: Callable[..., None], given: tuple[Any, ...]) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"})
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    main(rank, *given)
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


def machine() -> str:
    """What a table must say about where it was measured."""
    cores, load = os.cpu_count(), os.getloadavg()[0]
    return f"{platform.machine()}, {cores} cores, torch {torch.__version__}, load average {load:.0f}"
