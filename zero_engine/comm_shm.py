"""`Comm` through shared memory, between CPU processes of one kernel and one user.

Every buffer is a memfd whose descriptor the others receive over a socket: nothing has a name, so nothing can be left
behind. Readers look at the owner's bytes in place; only tokens of a few bytes travel over the sockets, in order, so a
rank that dies is seen at once as the end of its stream.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from zero_engine.comm import Buffer, Exchange, Gather, Ledger, diverged, reason_of, sent_in_exchange, sent_in_gather
from zero_engine.layout import Range
from zero_engine.pages import LARGE, Mapping
from zero_engine.sockets import ABORT, BUFFER, DONE, NOTE, READY, Sockets, between, introduced

_FORGET_BYTES = 1 << 20  # smallest read whose pages are dropped
_STRETCH_BYTES = 2 * LARGE  # copied before its pages are dropped; a bucket


class SharedComm:
    """Buckets and weights are read where their owner wrote them; the bytes booked are those a network would carry."""

    name = "shared"

    def __init__(self, rank: int, ranks: int, sockets: Sockets) -> None:
        self.rank, self.ranks, self.ledger, self.overlaps = rank, ranks, Ledger(), False
        self._sockets, self._buffers = sockets, 0
        self._labels = deque[str]()  # published here, not yet compared with the others'
        self._published = self._compared = 0
        self._others = [peer for peer in range(ranks) if peer != rank]
        self._exchanges = WeakKeyDictionary[Exchange, tuple[Buffer, list[Tensor | None]]]()  # the same every time

    def reserve(self, staging: Tensor, slice_elements: int) -> None:
        """Pieces are read in place."""

    def allocate(self, label: str, sizes: Sequence[int]) -> Buffer:
        self._buffers += 1
        descriptor = os.memfd_create(f"shardyard-{label}", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(sizes[self.rank], 1))
        own = Mapping(descriptor, max(sizes[self.rank], 1))
        own.enlarge()
        buffer = Buffer(self._buffers, label, own.bytes[: sizes[self.rank]])
        self._sockets.send(BUFFER, buffer.number, descriptor=descriptor)
        os.close(descriptor)
        for peer in self._others:
            received = self._sockets.descriptor(peer, buffer.number)
            buffer.peers[peer] = Mapping(received, max(sizes[peer], 1))
            os.close(received)
        return buffer

    def reclaim(self, buffer: Buffer) -> None:
        for peer in self._others:
            self._sockets.wait_done(peer, buffer.number, buffer.published)

    def publish(self, buffer: Buffer, label: str) -> None:
        buffer.published += 1
        self._published += 1
        self._sockets.send(READY, buffer.number, self._published, label)
        self._labels.append(label)

    def _meet(self, number: int) -> None:
        """Wait until every rank has published as often as this one had when it had published `number` times."""
        while self._compared < number:
            label = self._labels.popleft()
            self._compared += 1
            for peer in self._others:
                sequence, theirs = self._sockets.ready(peer)
                if (sequence, theirs) != (self._compared, label):
                    raise diverged(self.rank, label, peer, theirs)

    def release(self, buffer: Buffer) -> None:
        self._sockets.send(DONE, buffer.number)

    def exchange(self, buffer: Buffer, request: Exchange, purpose: str) -> Iterator[tuple[Range, list[Tensor | None]]]:
        known = self._exchanges.get(request)
        if known is None or known[0] is not buffer:
            known = self._exchanges[request] = (buffer, self._look_at(buffer, request))
        pieces = known[1]
        own = pieces[self.rank]
        self.ledger.add("exchange", purpose, sent_in_exchange(request, self.rank, 0 if own is None else own.itemsize))
        return self._pieces(buffer, request, pieces, self._published, purpose)

    def _look_at(self, buffer: Buffer, request: Exchange) -> list[Tensor | None]:
        """Each rank's piece of this rank's part of a bucket, where it stands."""
        part, pieces = request.owners[self.rank], list[Tensor | None]()
        for rank, name in enumerate(request.dtypes):
            dtype = None if name is None else getattr(torch, name)
            pieces.append(None if dtype is None else _part(self._bytes_of(buffer, rank), request.offset, part, dtype))
        return pieces

    def _pieces(
        self, buffer: Buffer, request: Exchange, pieces: list[Tensor | None], published: int, purpose: str
    ) -> Iterator[tuple[Range, list[Tensor | None]]]:
        part = request.owners[self.rank]
        with self.ledger.timed("exchange", purpose, 0):
            self._meet(published)
            if len(part):
                yield part, pieces
        for rank in self._others:
            if (piece := pieces[rank]) is not None:
                start = request.offset + part.start * piece.itemsize
                _forget(buffer.peers[rank], start, start + len(part) * piece.itemsize)

    def fetch(self, buffer: Buffer, request: Gather, target: Tensor, purpose: str) -> _Copy:
        self.ledger.add("gather", purpose, sent_in_gather(request, self.rank))
        return _Copy(self, buffer, request, target, purpose, self._published)

    def gather(self, buffer: Buffer, request: Gather, target: Tensor, purpose: str) -> None:
        self.fetch(buffer, request, target, purpose).wait()

    def _copy(self, copy: _Copy) -> None:
        buffer, request, target = copy.buffer, copy.request, copy.target
        with self.ledger.timed("gather", copy.purpose, 0):
            self._meet(copy.published)
            for rank, (source, place) in enumerate(zip(request.sources, request.targets, strict=True)):
                mine = target[place.start : place.stop]
                if rank != self.rank:
                    _copy_out(buffer.peers[rank], source, mine)
                elif (own := buffer.local[source.start : source.stop]).data_ptr() != mine.data_ptr():
                    mine.copy_(own)

    def look(self, buffer: Buffer, request: Gather, purpose: str) -> _Look:
        with self.ledger.timed("gather", purpose, sent_in_gather(request, self.rank)):
            self._meet(self._published)
        spans = list(enumerate(request.sources))
        parts = [self._bytes_of(buffer, rank)[part.start : part.stop] for rank, part in spans]
        return _Look(parts, [(buffer.peers[rank], part) for rank, part in spans if rank != self.rank])

    def _bytes_of(self, buffer: Buffer, rank: int) -> Tensor:
        return buffer.local if rank == self.rank else buffer.peers[rank].bytes

    def note(self, text: str) -> None:
        self._sockets.send(NOTE, text=text)

    def close(self, error: str | None = None) -> None:
        if error is not None:
            self._sockets.send(ABORT, text=reason_of(self.rank, error))
        self._sockets.close()
        self._exchanges.clear()


@dataclass(frozen=True)
class _Copy:
    """A gather to be made."""

    comm: SharedComm
    buffer: Buffer
    request: Gather
    target: Tensor
    purpose: str
    published: int  # by this rank when it began

    def wait(self) -> None:
        """Copy; bytes here do not move by themselves."""
        self.comm._copy(self)


@dataclass(frozen=True)
class _Look:
    """Bytes of others in their own memory."""

    parts: Sequence[Tensor]
    seen: Sequence[tuple[Mapping, Range]]

    def close(self) -> None:
        """Drop their pages from this process's tables."""
        for memory, part in self.seen:
            _forget(memory, part.start, part.stop)


def connect(group: dist.ProcessGroup | None, rank: int, ranks: int) -> SharedComm | None:
    """Shared memory between the ranks of `group`, or None on every rank when they do not share one kernel and user."""
    listener, cards = introduced(group, ranks)
    if len({place for place, _ in cards}) > 1:
        listener.close()
        return None
    return SharedComm(rank, ranks, between(listener, [address for _, address in cards], rank))


def connect_node(group: dist.ProcessGroup | None, rank: int, nodes: Sequence[int]) -> SharedComm:
    """Shared memory between the ranks of `group` that stand on this rank's node, numbered from 0; all of the group call
    it. `nodes`: of every rank.
    """
    listener, cards = introduced(group, len(nodes))
    members = [peer for peer, node in enumerate(nodes) if node == nodes[rank]]
    return SharedComm(
        members.index(rank),
        len(members),
        between(listener, [cards[peer][1] for peer in members], members.index(rank)),
    )


def _copy_out(memory: Mapping, part: Range, target: Tensor) -> None:
    """Copy another's bytes in stretches that end with a large page, so that few of them count as ours at a time."""
    start = part.start
    while start < part.stop:
        stop = min(part.stop, start // _STRETCH_BYTES * _STRETCH_BYTES + _STRETCH_BYTES)
        target[start - part.start : stop - part.start].copy_(memory.bytes[start:stop])
        if len(part) >= _FORGET_BYTES:
            memory.forget(start, stop)
        start = stop


def _forget(memory: Mapping, start: int, stop: int) -> None:
    """Drop what was read, where it is large: else every rank's resident size counts the others' buckets as its own."""
    if stop - start >= _FORGET_BYTES:
        memory.forget(start, stop)


def _part(storage: Tensor, offset: int, part: Range, dtype: torch.dtype) -> Tensor:
    size = dtype.itemsize
    return storage[offset + part.start * size : offset + part.stop * size].view(dtype)
