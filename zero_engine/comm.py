"""How bytes travel between ranks: the `Comm` protocol and the ledger that counts every one of them.

A reduction across ranks is an exchange of pieces and an ordered sum by the owner, so two reads are enough: `exchange`
(every owner reads its range of everybody's bucket) and `gather` (everybody reads every owner's range). A buffer that
others read goes through one cycle, the same for all transports:

    reclaim (wait until nobody reads it)  ->  write  ->  publish (this rank has)  ->  exchange | gather  ->  release

Nothing waits before it must: `publish`, `exchange` and `fetch` return at once, and the ranks meet where the bytes are
used. A rank that begins an exchange or a fetch early finds the bytes there when it comes for them.

`comm_group.py` moves bytes with a process group, `comm_shm.py` through shared memory; both pass the same tests.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from zero_engine.errors import DivergedError
from zero_engine.layout import Range
from zero_engine.pages import Mapping


@dataclass
class Buffer:
    """One allocation per rank of the group, all made in the same call."""

    number: int
    label: str
    local: Tensor  # 1-D uint8, this rank's bytes
    peers: dict[int, Mapping] = field(default_factory=dict)  # the others' bytes, where shared
    published: int = 0  # times this rank has published it


@dataclass(frozen=True, eq=False)
class Exchange:
    """A bucket inside everybody's buffer, and who makes and owns what.

    One object is used in every step: a transport keeps what it has worked out for it.
    """

    offset: int  # byte at which the bucket starts in the buffer
    owners: tuple[Range, ...]  # elements of the bucket by owner
    dtypes: tuple[str | None, ...]  # torch dtype name of each rank's piece; None where a rank has none
    label: str  # what diverging ranks are told they disagree about


@dataclass(frozen=True, eq=False)
class Gather:
    """Bytes that every rank reads from every owner; one object for every step, as an exchange."""

    sources: tuple[Range, ...]  # bytes in each owner's buffer
    targets: tuple[Range, ...]  # bytes in the target
    label: str
    checked: bool = False  # whether ranks may come here at different times: messages then say what they are about


@dataclass(frozen=True)
class Transfer:
    """A message that this rank waited for: seconds of the monotonic clock."""

    key: str  # "collective/purpose"
    begun: float  # on its way
    waited: float  # this rank had nothing else to do
    done: float


@dataclass(frozen=True)
class LedgerReport:
    """Payload of this rank by "collective/purpose", for example "exchange/gradients"."""

    bytes: dict[str, int]  # sent; what the plan predicts
    seconds: dict[str, float]  # spent waiting and copying
    hidden: dict[str, float] = field(default_factory=dict)  # on their way while this rank did something else

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())


class Ledger:
    """Counts payload bytes and seconds. Work outside a step is booked on a page of its own."""

    def __init__(self) -> None:
        self.page = "step"
        self._bytes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._hidden: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._transfers: list[Transfer] | None = None

    def add(self, collective: str, purpose: str, num_bytes: int, seconds: float = 0.0) -> None:
        """Book one message."""
        self._bytes[self.page][f"{collective}/{purpose}"] += num_bytes
        self._seconds[self.page][f"{collective}/{purpose}"] += seconds

    def move(self, source: str, target: str, num_bytes: int) -> None:
        """Book bytes of one "collective/purpose" under another: a message with several parts."""
        self._bytes[self.page][source] -= num_bytes
        self._bytes[self.page][target] += num_bytes

    def timed(self, collective: str, purpose: str, num_bytes: int) -> AbstractContextManager[None]:
        """Book one message and the time that the block takes."""
        return _Timed(self, f"{collective}/{purpose}", num_bytes)

    def book(self, key: str, num_bytes: int, begun: float, waited: float, done: float) -> None:
        """Book one message under "collective/purpose", with when it was begun, waited for, and there."""
        self._bytes[self.page][key] += num_bytes
        self._seconds[self.page][key] += done - waited
        self._hidden[self.page][key] += waited - begun
        if self._transfers is not None:
            self._transfers.append(Transfer(key, begun, waited, done))

    def record(self) -> None:
        """Keep every transfer from now on."""
        self._transfers = []

    def recorded(self) -> list[Transfer]:
        """The transfers kept; recording ends."""
        transfers, self._transfers = self._transfers or [], None
        return transfers

    @contextmanager
    def on(self, page: str) -> Iterator[None]:
        """Book everything inside the block on `page` (construction, evaluation, load, save)."""
        before, self.page = self.page, page
        try:
            yield
        finally:
            self.page = before

    def report(self, page: str = "step") -> LedgerReport:
        """What stands on a page; purposes without a byte are left out, one rank sends nothing."""
        sent = {key: count for key, count in self._bytes[page].items() if count}
        seconds, hidden = self._seconds[page], self._hidden[page]
        return LedgerReport(
            sent,
            {key: seconds[key] for key in self._bytes[page]},
            {key: value for key, value in hidden.items() if value},
        )

    def clear(self, page: str = "step") -> None:
        """Start a page again."""
        self._bytes.pop(page, None)
        self._seconds.pop(page, None)
        self._hidden.pop(page, None)


class _Timed:
    """Entered for every message: a class, which takes half as long as a generator."""

    def __init__(self, ledger: Ledger, key: str, num_bytes: int) -> None:
        self._ledger, self._key, self._bytes = ledger, key, num_bytes

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._ledger.book(self._key, self._bytes, self._start, self._start, time.perf_counter())


class Arrival(Protocol):
    """Bytes on their way to a target."""

    def wait(self) -> None:
        """Returns when they are there. Call it once. Raises PeerError, DivergedError."""


class Sight(Protocol):
    """Every owner's bytes where they stand."""

    @property
    def parts(self) -> Sequence[Tensor]:
        """1-D uint8 by owner, read only."""

    def close(self) -> None:
        """This rank will not look here again before the owners write."""


class Comm(Protocol):
    """What the engine needs of a transport. Every method is called by all ranks in the same order."""

    rank: int
    ranks: int
    ledger: Ledger
    name: str  # group | shared
    overlaps: bool  # whether bytes travel while this rank computes, so that it pays to begin early

    def allocate(self, label: str, sizes: Sequence[int]) -> Buffer:
        """A zeroed buffer of `sizes[rank]` bytes on every rank, on the engine's device."""

    def reclaim(self, buffer: Buffer) -> None:
        """Wait until no other rank reads what this rank published, so that it may write again."""

    def publish(self, buffer: Buffer, label: str) -> None:
        """This rank has written its bytes. When ranks publish under different labels, the next read that waits for the
        others raises DivergedError.
        """

    def exchange(self, buffer: Buffer, request: Exchange, purpose: str) -> Iterator[tuple[Range, list[Tensor | None]]]:
        """This rank's range of the bucket in slices: bucket elements, and each rank's piece of them (1-D, read only).

        Messages are on their way when this returns, where there is room for what arrives; the iterator must be run to
        its end before the next exchange but one.
        """

    def fetch(self, buffer: Buffer, request: Gather, target: Tensor, purpose: str) -> Arrival:
        """Begin to bring every owner's bytes to `target` (1-D uint8; may be the buffer itself)."""

    def gather(self, buffer: Buffer, request: Gather, target: Tensor, purpose: str) -> None:
        """`fetch`, and wait."""

    def look(self, buffer: Buffer, request: Gather, purpose: str) -> Sight | None:
        """A gather without a copy, for bytes that are read once; None where they must be fetched."""

    def release(self, buffer: Buffer) -> None:
        """This rank no longer reads what the others published."""

    def reserve(self, staging: Tensor, slice_elements: int) -> None:
        """Use `staging` (1-D uint8) for arriving pieces of at most `slice_elements`, where the transport needs any."""

    def note(self, text: str) -> None:
        """Tell the others what went wrong here, for the message they show if this rank ends."""

    def close(self, error: str | None = None) -> None:
        """Give everything back; with an error, make every waiting rank fail with it."""


def diverged(rank: int, label: str, peer: int, theirs: str) -> DivergedError:
    """What ranks that ran different code are told."""
    return DivergedError(
        f"rank {rank} is at '{label}' while rank {peer} is at '{theirs}': the ranks ran different modules or calls; "
        "make the control flow the same on all ranks"
    )


def reason_of(rank: int, error: str) -> str:
    """What other ranks are told; a reason that came from another rank is passed on as it is."""
    return error if error.startswith("rank ") else f"rank {rank} failed: {error}"


def sent_in_exchange(request: Exchange, rank: int, item_bytes: int) -> int:
    """Payload bytes that `rank` sends."""
    if request.dtypes[rank] is None:
        return 0
    return item_bytes * sum(len(part) for owner, part in enumerate(request.owners) if owner != rank)


def sent_in_gather(request: Gather, rank: int) -> int:
    """Payload bytes that `rank` sends."""
    return len(request.sources[rank]) * (len(request.sources) - 1)
