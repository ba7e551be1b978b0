"""Connections between processes of one host, where the pace of a real network is only in the way.

Note: why. Many systems let the kernel pace what is sent (BBR). Over loopback nothing is lost and nothing queues, so all
that pacing does there is to set timers and wait for them: between two busy processes 160 MB each way took 106 ms so,
and 81 ms with Reno, which every kernel has and every user may choose, and which sends as fast as the other side reads.
Connections to other hosts keep what their administrator chose.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_DESCRIPTORS = "/proc/self/fd"


@contextmanager
def unpaced() -> Iterator[None]:
    """TCP connections that this process makes meanwhile are not paced where both ends are on this host. Linux only."""
    before = sockets()
    yield
    for descriptor in sockets() - before:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:  # else closed, or still alone
            if _within_host(connection):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def sockets() -> set[int]:
    """Descriptors of this process's sockets; none where the platform does not list them."""
    found = set[int]()
    for name in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with suppress(OSError):  # that of the listing itself is closed by now
            if os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
                found.add(int(name))
    return found


def _within_host(connection: socket.socket) -> bool:
    """Whether both ends of a TCP connection have one address. Raises OSError where it is not connected."""
    over_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
    return over_tcp and connection.getsockname()[0] == connection.getpeername()[0]
