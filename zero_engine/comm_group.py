"""`Comm` over a torch process group: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.util import Finalize
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zero_engine.comm import Buffer, Exchange, Gather, Ledger, diverged, reason_of, sent_in_exchange, sent_in_gather
from zero_engine.errors import PeerError
from zero_engine.layout import Range
from zero_engine.pages import host_memory
from zero_engine.wire import Bell, Message, PeerLost, Wire, Work

_LABEL_BYTES = 96
_SETS = 2  # of slices in the staging
_UNHEARD = "; the store where the ranks met is gone too, so that another rank may have failed first"


class _UnderWay(NamedTuple):
    """Messages that were started. One is made for every message: a tuple takes a quarter of the time of a dataclass."""

    works: Sequence[Work]
    begun: float  # seconds of the monotonic clock


@dataclass(frozen=True)
class _Word:
    """Where this rank says that it is, and what the others will have said."""

    label: str
    own: Tensor  # 1-D uint8
    heard: Tensor  # (ranks, label bytes) uint8; the own row is not used
    works: Sequence[Work]


@dataclass(frozen=True)
class _Slice:
    """Messages of one slice number of an exchange, and what they bring."""

    sends: Sequence[Message]
    receives: Sequence[Message]
    part: Range | None  # of this rank, elements of the bucket; None after its last
    pieces: list[Tensor | None]  # of it, by rank


@dataclass(frozen=True)
class _Exchanged:
    """What an exchange comes to between these ranks; the same every time."""

    buffer: Buffer
    about: str
    num_bytes: int  # that this rank sends
    sets: int  # of the staging that it takes
    slices: Sequence[Sequence[_Slice]]  # by the set in which the first one arrives


class _Arriving(NamedTuple):
    """An exchange under way."""

    sets: Sequence[int]  # of the staging that it has
    slices: Sequence[_Slice]
    posted: deque[_UnderWay]


@dataclass(frozen=True)
class _Gathered:
    """What a gather comes to between these ranks; the same every time."""

    buffer: Buffer
    target: Tensor
    num_bytes: int  # that this rank sends
    own: Tensor
    place: Tensor | None  # where the own part is copied to; None where it stands
    whole: Tensor | None  # of all parts, where they are even
    sends: Sequence[Message]
    receives: Sequence[Message]


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
        self._others = [peer for peer in range(ranks) if peer != rank]
        self._wire, self._device, self._slice = wire, device, 1  # elements of a slice
        self._room = 0  # bytes for an arriving one
        self._free: Sequence[int] = range(_SETS)  # sets of the staging in which nothing arrives
        self._waiting = 0  # exchanges for which there was no room
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)  # two sets of one slice per peer
        self._buffers = 0
        self._bell, self._peers_named = bell, _PeersNamed(bell)
        self._speaks = ranks > 1 and device.type == "cpu"
        self._words = deque[_Word]()  # said, not yet compared
        self._said = self._compared = 0
        self._exchanges = WeakKeyDictionary[Exchange, _Exchanged]()
        self._gathers = WeakKeyDictionary[Gather, _Gathered]()
        self._end = Finalize(self, wire.end, exitpriority=0)  # where `atexit` is not run too: in multiprocessing's own

    def reserve(self, staging: Tensor, slice_elements: int) -> None:
        self._staging, self._slice = staging, slice_elements
        self._room = staging.numel() // max(1, _SETS * (self.ranks - 1))

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
        self._say(label)

    def _say(self, label: str) -> None:
        """All ranks say where they are; on a GPU comparing would cost a wait, and NCCL's own watchdog has to do."""
        if not self._speaks:
            return
        text = label.encode()[:_LABEL_BYTES].ljust(_LABEL_BYTES)
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        heard = torch.empty(self.ranks, _LABEL_BYTES, dtype=torch.uint8)
        sends = [(peer, own) for peer in self._others]
        with self._peers_named:
            works = self._wire.tell(sends, [(peer, heard[peer]) for peer in self._others])
        self._words.append(_Word(label, own, heard, works))
        self._said += 1

    def _compare(self, number: int) -> None:
        """Raises DivergedError unless the first `number` words were the same on all ranks."""
        while self._compared < number:
            word = self._words.popleft()
            self._wait(word.works)
            for peer in self._others:
                if not torch.equal(word.heard[peer], word.own):
                    theirs = bytes(word.heard[peer].tolist()).decode(errors="replace").strip()
                    raise diverged(self.rank, word.label, peer, theirs)
            self._compared += 1

    def release(self, buffer: Buffer) -> None:
        """Nothing is read from others."""

    def exchange(self, buffer: Buffer, request: Exchange, purpose: str) -> Iterator[tuple[Range, list[Tensor | None]]]:
        known = self._exchanges.get(request)
        if known is None or known.buffer is not buffer:
            known = self._exchanges[request] = self._prepare_exchange(buffer, request)
        self.ledger.add("exchange", purpose, known.num_bytes)
        number = self._begin(buffer)
        arriving = None
        if self._waiting == 0 and len(self._free) >= known.sets:
            arriving = self._post(known, number)
        else:
            self._waiting += 1
        return self._arrivals(known, number, arriving, self._said, purpose)

    def _post(self, known: _Exchanged, request: int) -> _Arriving:
        """Start the first slices in sets of the staging that are free."""
        sets, self._free = self._free[: known.sets], self._free[known.sets :]
        slices = known.slices[sets[0] if sets else 0]
        return _Arriving(sets, slices, deque(self._start(request, each, known.about) for each in slices[:_SETS]))

    def _arrivals(
        self, known: _Exchanged, request: int, arriving: _Arriving | None, words: int, purpose: str
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
            for following in slices[number + _SETS - 1 : number + _SETS]:
                posted.append(self._start(request, following, known.about))
        if not slices:
            self._compare(words)
            self._thank(request)
        self._free = sorted((*self._free, *sets))

    def _prepare_exchange(self, buffer: Buffer, request: Exchange) -> _Exchanged:
        dtypes = [None if name is None else getattr(torch, name) for name in request.dtypes]
        mine = dtypes[self.rank]
        own = None if mine is None else _typed(buffer.local, request.offset, request.owners[-1].stop, mine)
        sent = sent_in_exchange(request, self.rank, 0 if mine is None else mine.itemsize)
        size = self._slice if self._others else max(1, request.owners[-1].stop)
        parts = [list(_cut(part, size)) for part in request.owners]
        count = max(map(len, parts))
        slices = [
            [self._prepare_slice(own, dtypes, parts, number, (first + number) % _SETS) for number in range(count)]
            for first in range(_SETS)
        ]
        return _Exchanged(buffer, request.label, sent, min(count, _SETS), slices)

    def _prepare_slice(
        self,
        own: Tensor | None,
        dtypes: Sequence[torch.dtype | None],
        parts: Sequence[Sequence[Range]],
        number: int,
        into: int,
    ) -> _Slice:
        """Slice `number` of `own`, this rank's piece of the bucket, and of the others' of this rank's part, which
        arrive in set `into` of the staging.
        """
        sends, receives = list[Message](), list[Message]()
        pieces: list[Tensor | None] = [None] * self.ranks
        mine = parts[self.rank][number] if number < len(parts[self.rank]) else None
        for place, peer in enumerate(self._others):
            if own is not None and number < len(parts[peer]):
                part = parts[peer][number]
                sends.append((peer, own[part.start : part.stop]))
            dtype = dtypes[peer]
            if dtype is not None and mine is not None:
                start = (place + len(self._others) * into) * self._room
                pieces[peer] = piece = _typed(self._staging, start, len(mine), dtype)
                receives.append((peer, piece))
        if own is not None and mine is not None:
            pieces[self.rank] = own[mine.start : mine.stop]
        return _Slice(sends, receives, mine, pieces)

    def fetch(self, buffer: Buffer, request: Gather, target: Tensor, purpose: str) -> _Fetched:
        known = self._gathers.get(request)
        if known is None or known.buffer is not buffer or known.target is not target:
            known = self._gathers[request] = self._prepare_gather(buffer, request, target)
        self.ledger.add("gather", purpose, known.num_bytes)
        if request.checked:
            self._say(request.label)
        if known.whole is not None:
            with self._peers_named:
                if self._wire.gather(known.whole, known.own):
                    return _Fetched(self, _UnderWay((), time.perf_counter()), self._said, purpose)
        number = self._begin(buffer)
        under_way = self._start(number, known, request.label)
        if known.place is not None:
            known.place.copy_(known.own)
        return _Fetched(self, under_way, self._said, purpose, number)

    def _prepare_gather(self, buffer: Buffer, request: Gather, target: Tensor) -> _Gathered:
        source, place = request.sources[self.rank], request.targets[self.rank]
        own, there = buffer.local[source.start : source.stop], target[place.start : place.stop]
        even = bool(self._others) and _even(request.targets)
        parts = [(peer, request.targets[peer]) for peer in self._others]
        return _Gathered(
            buffer,
            target,
            sent_in_gather(request, self.rank),
            own,
            None if own.data_ptr() == there.data_ptr() else there,
            target[request.targets[0].start : request.targets[-1].stop] if even else None,
            [(peer, own) for peer in self._others] if own.numel() else [],
            [(peer, target[part.start : part.stop]) for peer, part in parts if len(part)],
        )

    def gather(self, buffer: Buffer, request: Gather, target: Tensor, purpose: str) -> None:
        self.fetch(buffer, request, target, purpose).wait()

    def look(self, buffer: Buffer, request: Gather, purpose: str) -> None:
        """Others' bytes are out of sight."""

    def _begin(self, buffer: Buffer) -> int:
        with self._peers_named:
            return self._wire.begin(buffer.number)

    def _start(self, request: int, messages: _Slice | _Gathered, about: str) -> _UnderWay:
        begun = time.perf_counter()
        with self._peers_named:
            return _UnderWay(self._wire.start(request, messages.sends, messages.receives, about), begun)

    def _arrive(self, under_way: _UnderWay, words: int, collective: str, purpose: str) -> None:
        """Wait for messages that began when `words` had been said."""
        waited = time.perf_counter()
        self._compare(words)
        self._wait(under_way.works)
        self.ledger.book(f"{collective}/{purpose}", 0, under_way.begun, waited, time.perf_counter())

    def _wait(self, works: Sequence[Work]) -> None:
        with self._peers_named:
            for work in works:
                work.wait()

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
        self._staging = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class _PeersNamed:
    """Raises PeerError with the reason when a rank is gone."""

    bell: Bell

    def __enter__(self) -> None:
        """Entered for every message: a class, which takes half as long as a generator."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise PeerError(self._reason(error)) from error

    def _reason(self, error: RuntimeError) -> str:
        """Who leaves after an error says so first: where nothing was said, the rank whose connection broke has died."""
        said = self.bell.heard()
        lost = str(error) if isinstance(error, PeerLost) else f"a rank of the group is gone: {error}"
        return said or lost + (_UNHEARD if said is None else "")


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


def _typed(storage: Tensor, offset: int, elements: int, dtype: torch.dtype) -> Tensor:
    return storage[offset : offset + elements * dtype.itemsize].view(dtype)


def _cut(part: Range, size: int) -> Iterator[Range]:
    for start in range(part.start, part.stop, size):
        yield Range(start, min(start + size, part.stop))


def _even(parts: tuple[Range, ...]) -> bool:
    return len({len(part) for part in parts}) == 1 and all(a.stop == b.start for a, b in pairwise(parts))
