"""Ordered streams of small messages between processes of one kernel and one user, and how these meet.

Descriptors travel with the messages, and a process that dies is seen at once as the end of its stream.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zero_engine.errors import PeerError

READY, DONE, NOTE, ABORT, BUFFER = range(5)
_HEAD = struct.Struct("<BIQ")  # kind, buffer number, sequence number; a label in UTF-8 follows
_MESSAGE_BYTES = 4096
_LAST_WORDS = 256  # messages read from a broken stream


class Sockets:
    """One ordered stream of small messages to every other rank."""

    def __init__(self, peers: dict[int, socket.socket]) -> None:
        self._peers = peers
        self._ready: dict[int, deque[tuple[int, str]]] = defaultdict(deque)  # (sequence, label) not yet waited for
        self._done: dict[tuple[int, int], int] = defaultdict(int)  # (peer, buffer): releases seen
        self._notes: dict[int, str] = {}
        self._descriptors: dict[tuple[int, int], int] = {}

    def send(
        self, kind: int, number: int = 0, sequence: int = 0, text: str = "", descriptor: int | None = None
    ) -> None:
        """One message to everybody. Raises PeerError when a peer is gone."""
        data = _HEAD.pack(kind, number, sequence) + text.encode()[: _MESSAGE_BYTES - _HEAD.size]
        for peer, stream in self._peers.items():
            try:
                if descriptor is None:
                    stream.send(data)
                else:
                    socket.send_fds(stream, [data], [descriptor])
            except OSError as error:
                if kind in (READY, BUFFER):  # who has left needs no release and no last words
                    self._lost(peer, error)

    def ready(self, peer: int) -> tuple[int, str]:
        """The next publication of `peer`: (sequence, label)."""
        while not self._ready[peer]:
            self._receive(peer)
        return self._ready[peer].popleft()

    def wait_done(self, peer: int, number: int, count: int) -> None:
        """Wait until `peer` has released buffer `number` `count` times."""
        while self._done[peer, number] < count:
            self._receive(peer)

    def descriptor(self, peer: int, number: int) -> int:
        """The file descriptor of `peer`'s buffer `number`."""
        while (peer, number) not in self._descriptors:
            self._receive(peer)
        return self._descriptors.pop((peer, number))

    def _receive(self, peer: int) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._peers[peer], _MESSAGE_BYTES, 1)
        except OSError as error:
            self._lost(peer, error)
        if not data:
            self._lost(peer, None)
        kind, number, sequence = _HEAD.unpack_from(data)
        text = data[_HEAD.size :].decode(errors="replace")
        if kind == READY:
            self._ready[peer].append((sequence, text))
        elif kind == DONE:
            self._done[peer, number] += 1
        elif kind == BUFFER:
            self._descriptors[peer, number] = descriptors[0]
        elif kind == NOTE:
            self._notes[peer] = text
        else:
            raise PeerError(text)

    def _lost(self, peer: int, error: OSError | None) -> Any:
        """The connection broke: what the peer said last is the reason, and may still wait to be read."""
        for kind, text in self._last_words(peer):
            if kind == ABORT:
                raise PeerError(text) from error
            if kind == NOTE:
                self._notes[peer] = text
        reason = self._notes.get(peer) or (f"connection lost ({error})" if error else "its process ended")
        raise PeerError(f"rank {peer} failed: {reason}") from error

    def _last_words(self, peer: int) -> Iterator[tuple[int, str]]:
        """(kind, text) of every message still in the stream; a reset is told once, before what was sent earlier."""
        for _ in range(_LAST_WORDS):
            try:
                data = self._peers[peer].recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except ConnectionResetError:
                continue
            except OSError:
                return
            if not data:
                return
            yield data[0], data[_HEAD.size :].decode(errors="replace")

    def close(self) -> None:
        for stream in self._peers.values():
            stream.close()


def introduced(group: dist.ProcessGroup | None, ranks: int) -> tuple[socket.socket, list[Any]]:
    """A socket that listens, and (place, address) of every rank's."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0shardyard-" + os.urandom(16).hex())
    listener.listen(ranks)
    cards: list[Any] = [None] * ranks
    dist.all_gather_object(cards, (place(), listener.getsockname()), group=group)
    return listener, cards


def between(listener: socket.socket, addresses: Sequence[Any], rank: int) -> Sockets:
    """The streams of rank number `rank` of those that listen at `addresses`."""
    peers = dict[int, socket.socket]()
    for peer in range(rank):
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stream.connect(addresses[peer])
        stream.send(rank.to_bytes(4, "little"))
        peers[peer] = stream
    while len(peers) < len(addresses) - 1:
        stream, _ = listener.accept()
        if _user_of(stream) == os.getuid():
            peers[int.from_bytes(stream.recv(4), "little")] = stream
        else:
            stream.close()
    listener.close()
    return Sockets(dict(sorted(peers.items())))


def place() -> tuple[str, int, int]:
    """What must be equal for descriptors to travel: the kernel's boot, the network namespace, the user."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not (hasattr(os, "memfd_create") and boot.exists()):
        return (os.urandom(16).hex(), 0, 0)
    return (boot.read_text().strip(), os.stat("/proc/self/ns/net").st_ino, os.getuid())


def _user_of(stream: socket.socket) -> int:
    return int(struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])
