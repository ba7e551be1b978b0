"""What a fork of the zygote runs: read the order, then hand over to `workers.rank.main`."""

from __future__ import annotations

from pathlib import Path

from workers.contract import LaunchOrder


def start(order_file: str, listen_fd: int | None) -> int | None:
    """Run one rank. `listen_fd` is rank 0's rendezvous socket, already listening; None on the other ranks."""
    from workers.rank import main

    return main(LaunchOrder.model_validate_json(Path(order_file).read_text()), listen_fd)
