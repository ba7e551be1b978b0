"""A port for a server that is started again on it."""

from __future__ import annotations

import random
import socket

QUIET = range(20_000, 30_000)  # below what the kernel gives by chance, above what `serve` and Ray try first


def quiet_port() -> int:
    """A loopback port on which nobody listens, and which nobody is given who did not ask for it."""
    for port in random.SystemRandom().sample(QUIET, 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("100 ports are in use")
