"""`Comm` over a torch process group: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.util import Finalize
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zero_engine.comm import Buffer, Exchange, Gather, Ledger, reason_of
from zero_engine.layout import Range
from zero_engine.messages import (
    SETS,
    ExchangeMessages,
    GatherMessages,
    Landing,
    Slice,
    exchange_messages,
    gather_messages,
)
from zero_engine.pages import host_memory
from zero_engine.wire import Bell, PeersNamed, Wire, Work
from zero_engine.words import Silence, Words


class _UnderWay(NamedTuple):
    """Messages that were started. One is made for every message: a tuple takes a quarter of the time of a dataclass."""

    works: Sequence[Work]
    begun: float  # seconds of the monotonic clock


class _Arriving(NamedTuple):
    """An exchange under way."""

    sets: Sequence[int]  # of the staging that it has
    slices: Sequence[Slice]
    posted: deque[_UnderWay]


class GroupComm:
    """Point-to-point messages in slices that fit the reserved staging, two under way while one is summed.

    gloo's own reduce-scatter and all-reduce are three to four times slower than this exchange, and sum in an order of
    their own; NCCL runs the same messages as one grouped launch, and `all_gather_into_tensor` where shards are even.
    A group of one rank sends nothing and needs no torch.distributed.

    Note: who waits for what. gloo moves bytes in threads of its own, but only between a send and a receive that both
    stand, so both are started as early as there is memory for them. Words (labels) travel ahead of the data on the same
    streams and are compared when the data is needed: ranks that ran different modules are told so, and ranks that did
    not never wait for a word alone. Nobody waits for what was sent until its buffer is to be written again: `reclaim`
    waits until the others have it, and so do `close` and, without that, the end of the process or of this object, for
    a bounded time (`gloo_wire.py`).
    """

    name = "group"

    def __init__(self, wire: Wire, rank: int, ranks: int, device: torch.device, bell: Bell) -> None:
        self.rank, self.ranks, self.ledger, self.overlaps = rank, ranks, Ledger(), ranks > 1
        self._wire, self._device = wire, device
        self._landing = Landing(rank, ranks, torch.empty(0, dtype=torch.uint8, device=device), 1)
        self._free: Sequence[int] = range(SETS)  # sets of the staging in which nothing arrives
        self._waiting = 0  # exchanges for which there was no room
        self._buffers = 0
        self._bell, self._peers_named = bell, PeersNamed(bell)
        speaks = ranks > 1 and device.type == "cpu"
        self._words = Words(wire, rank, ranks, self._peers_named) if speaks else Silence()
        self._exchanges = WeakKeyDictionary[Exchange, ExchangeMessages]()
        self._gathers = WeakKeyDictionary[Gather, GatherMessages]()
        self._end = Finalize(self, wire.end, exitpriority=0)  # where `atexit` is not run too: in multiprocessing's own

    def reserve(self, staging: Tensor, slice_elements: int) -> None:
        self._landing = Landing(self.rank, self.ranks, staging, slice_elements)

    def allocate(self, label: str, sizes: Sequence[int]) -> Buffer:
        self._buffers += 1
        size, on_host = sizes[self.rank], self._device.type == "cpu"
        local = host_memory(size) if on_host else torch.zeros(size, dtype=torch.uint8, device=self._device)
        return Buffer(self._buffers, label, local)

    def reclaim(self, buffer: Buffer) -> None:
        with self._peers_named:
            self._wire.settle(buffer.number)

    def publish(self, buffer: Buffer, label: str) -> None:
        buffer.published += 1
        self._words.say(label)

    def release(self, buffer: Buffer) -> None:
        """Nothing is read from others."""

    def exchange(self, buffer: Buffer, request: Exchange, purpose: str) -> Iterator[tuple[Range, list[Tensor | None]]]:
        known = self._exchanges.get(request)
        if known is None or known.buffer is not buffer:
            known = self._exchanges[request] = exchange_messages(self._landing, buffer, request)
        self.ledger.add("exchange", purpose, known.num_bytes)
        number = self._begin(buffer)
        arriving = None
        if self._waiting == 0 and len(self._free) >= known.sets:
            arriving = self._post(known, number)
        else:
            self._waiting += 1
        return self._arrivals(known, number, arriving, self._words.said, purpose)

    def _post(self, known: ExchangeMessages, request: int) -> _Arriving:
        """Start the first slices in sets of the staging that are free."""
        sets, self._free = self._free[: known.sets], self._free[known.sets :]
        slices = known.slices[sets[0] if sets else 0]
        return _Arriving(sets, slices, deque(self._start(request, each, known.about) for each in slices[:SETS]))

    def _arrivals(
        self, known: ExchangeMessages, request: int, arriving: _Arriving | None, words: int, purpose: str
    ) -> Iterator[tuple[Range, list[Tensor | None]]]:
        if arriving is None:  # there was no room; those before have been run to their ends
            assert len(self._free) >= known.sets, self._free
            self._waiting -= 1
            arriving = self._post(known, request)
        sets, slices, posted = arriving
        for number, slice_ in enumerate(slices, start=1):
            self._arrive(posted.popleft(), words, "exchange", purpose)
            if number == len(slices):
                self._thank(request)  # before the sums: who sent may wait for it to write again
            if slice_.part is not None:
                yield slice_.part, slice_.pieces
            for following in slices[number + SETS - 1 : number + SETS]:
                posted.append(self._start(request, following, known.about))
        if not slices:
            self._words.compare(words)
            self._thank(request)
        self._free = sorted((*self._free, *sets))

    def fetch(self, buffer: Buffer, request: Gather, target: Tensor, purpose: str) -> _Fetched:
        known = self._gathers.get(request)
        if known is None or known.buffer is not buffer or known.target is not target:
            known = self._gathers[request] = gather_messages(self._landing, buffer, request, target)
        self.ledger.add("gather", purpose, known.num_bytes)
        if request.checked:
            self._words.say(request.label)
        if known.whole is not None:
            with self._peers_named:
                if self._wire.gather(known.whole, known.own):
                    return _Fetched(self, _UnderWay((), time.perf_counter()), self._words.said, purpose)
        number = self._begin(buffer)
        under_way = self._start(number, known, request.label)
        if known.place is not None:
            known.place.copy_(known.own)
        return _Fetched(self, under_way, self._words.said, purpose, number)

    def gather(self, buffer: Buffer, request: Gather, target: Tensor, purpose: str) -> None:
        self.fetch(buffer, request, target, purpose).wait()

    def look(self, buffer: Buffer, request: Gather, purpose: str) -> None:
        """Others' bytes are out of sight."""

    def _begin(self, buffer: Buffer) -> int:
        with self._peers_named:
            return self._wire.begin(buffer.number)

    def _start(self, request: int, messages: Slice | GatherMessages, about: str) -> _UnderWay:
        begun = time.perf_counter()
        with self._peers_named:
            return _UnderWay(self._wire.start(request, messages.sends, messages.receives, about), begun)

    def _arrive(self, under_way: _UnderWay, words: int, collective: str, purpose: str) -> None:
        """Wait for messages that began when `words` had been said."""
        waited = time.perf_counter()
        self._words.compare(words)
        with self._peers_named:
            for work in under_way.works:
                work.wait()
        self.ledger.book(f"{collective}/{purpose}", 0, under_way.begun, waited, time.perf_counter())

    def _thank(self, request: int) -> None:
        with self._peers_named:
            self._wire.arrived(request)

    def note(self, text: str) -> None:
        self._bell.ring(f"rank {self.rank} failed: {text}")

    def close(self, error: str | None = None) -> None:
        """With an error the connections are cut, which wakes every waiting rank; without, they end with this object,
        and this rank waits until the others have what it sent.
        """
        if error is not None:
            self._bell.ring(reason_of(self.rank, error))
            self._wire.cut()
        self._end()
        self._exchanges.clear()
        self._gathers.clear()
        self._landing = Landing(self.rank, self.ranks, torch.empty(0, dtype=torch.uint8), 1)


class _Fetched(NamedTuple):
    """A gather under way."""

    comm: GroupComm
    under_way: _UnderWay
    words: int  # said when it began
    purpose: str
    request: int | None = None  # where messages carry it

    def wait(self) -> None:
        """Returns when every part is in its place."""
        self.comm._arrive(self.under_way, self.words, "gather", self.purpose)
        if self.request is not None:
            self.comm._thank(self.request)
