"""Connections within a host are not paced; all others stay as the system makes them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from zero_engine.loopback import unpaced

SYSTEM = Path("/proc/sys/net/ipv4/tcp_congestion_control")

pytestmark = pytest.mark.skipif(not SYSTEM.exists(), reason="Linux alone lets a socket choose its congestion control")


@contextmanager
def _connection(address: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of one from `address` to 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as near:
        near.bind((address, 0))
        near.connect(server.getsockname())
        far, _ = server.accept()
        with far:
            yield near, far


def _algorithm(connection: socket.socket) -> str:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def test_connections_within_a_host_that_are_made_meanwhile_are_not_paced() -> None:
    with ExitStack() as stack:
        before = stack.enter_context(_connection("127.0.0.1"))
        with unpaced():
            within = stack.enter_context(_connection("127.0.0.1"))
            apart = stack.enter_context(_connection("127.0.0.2"))
            local = socket.socketpair()
            alone = stack.enter_context(socket.socket())
        after = stack.enter_context(_connection("127.0.0.1"))
        system = SYSTEM.read_text().strip()
        assert [_algorithm(end) for end in within] == ["reno", "reno"]
        assert {_algorithm(end) for end in (*before, *apart, *after, alone)} == {system}
        local[0].sendall(b"x")
        assert local[1].recv(1) == b"x"
        for end in local:
            end.close()
