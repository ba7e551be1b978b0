"""What an exchange or a gather comes to between the ranks of a group: messages, worked out once for every step.

Nothing is sent here; `comm_group.py` starts these messages and waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from zero_engine.comm import Buffer, Exchange, Gather, sent_in_exchange, sent_in_gather
from zero_engine.layout import Range
from zero_engine.wire import Message

SETS = 2  # of slices in the staging


@dataclass(frozen=True)
class Landing:
    """The staging as one rank sees it: SETS sets of places, one place for a slice of each other rank."""

    rank: int
    ranks: int
    staging: Tensor  # 1-D uint8
    slice: int  # elements that are sent at once

    @cached_property
    def others(self) -> Sequence[int]:
        """All ranks but this one."""
        return [peer for peer in range(self.ranks) if peer != self.rank]

    def place(self, of: int, peer: int, elements: int, dtype: torch.dtype) -> Tensor:
        """Where a slice of `peer` arrives in set `of`."""
        room = self.staging.numel() // (SETS * len(self.others))
        return _typed(self.staging, room * (self.others.index(peer) + len(self.others) * of), elements, dtype)


@dataclass(frozen=True)
class Slice:
    """Messages of one slice number of an exchange, and what they bring."""

    sends: Sequence[Message]
    receives: Sequence[Message]
    part: Range | None  # of this rank, elements of the bucket; None after its last
    pieces: list[Tensor | None]  # of it, by rank


@dataclass(frozen=True)
class ExchangeMessages:
    """An exchange, the same every time."""

    buffer: Buffer
    about: str
    num_bytes: int  # that this rank sends
    sets: int  # of the staging that it takes
    slices: Sequence[Sequence[Slice]]  # by the set in which the first one arrives


@dataclass(frozen=True)
class GatherMessages:
    """A gather, the same every time."""

    buffer: Buffer
    target: Tensor
    num_bytes: int  # that this rank sends
    own: Tensor
    place: Tensor | None  # where the own part is copied to; None where it stands
    whole: Tensor | None  # of all parts, where they are even
    sends: Sequence[Message]
    receives: Sequence[Message]


def exchange_messages(landing: Landing, buffer: Buffer, request: Exchange) -> ExchangeMessages:
    """Slices that follow each other through the sets, for each set that the first of them may find free."""
    rank = landing.rank
    dtypes = [None if name is None else getattr(torch, name) for name in request.dtypes]
    mine = dtypes[rank]
    own = None if mine is None else _typed(buffer.local, request.offset, request.owners[-1].stop, mine)
    size = landing.slice if landing.others else max(1, request.owners[-1].stop)
    parts = [list(_cut(part, size)) for part in request.owners]
    count = max(map(len, parts))
    slices = [
        [_slice(landing, own, dtypes, parts, number, (first + number) % SETS) for number in range(count)]
        for first in range(SETS)
    ]
    sent = sent_in_exchange(request, rank, 0 if mine is None else mine.itemsize)
    return ExchangeMessages(buffer, request.label, sent, min(count, SETS), slices)


def _slice(
    landing: Landing,
    own: Tensor | None,
    dtypes: Sequence[torch.dtype | None],
    parts: Sequence[Sequence[Range]],
    number: int,
    into: int,
) -> Slice:
    """Slice `number` of `own`, this rank's piece of the bucket, and of the others' of this rank's part."""
    sends, receives = list[Message](), list[Message]()
    rank = landing.rank
    pieces: list[Tensor | None] = [None] * landing.ranks
    mine = parts[rank][number] if number < len(parts[rank]) else None
    for peer in landing.others:
        if own is not None and number < len(parts[peer]):
            part = parts[peer][number]
            sends.append((peer, own[part.start : part.stop]))
        dtype = dtypes[peer]
        if dtype is not None and mine is not None:
            pieces[peer] = piece = landing.place(into, peer, len(mine), dtype)
            receives.append((peer, piece))
    if own is not None and mine is not None:
        pieces[rank] = own[mine.start : mine.stop]
    return Slice(sends, receives, mine, pieces)


def gather_messages(landing: Landing, buffer: Buffer, request: Gather, target: Tensor) -> GatherMessages:
    """The own part to everybody, and everybody's to its place in the target."""
    source, place = request.sources[landing.rank], request.targets[landing.rank]
    own, there = buffer.local[source.start : source.stop], target[place.start : place.stop]
    even = bool(landing.others) and _even(request.targets)
    parts = [(peer, request.targets[peer]) for peer in landing.others]
    return GatherMessages(
        buffer,
        target,
        sent_in_gather(request, landing.rank),
        own,
        None if own.data_ptr() == there.data_ptr() else there,
        target[request.targets[0].start : request.targets[-1].stop] if even else None,
        [(peer, own) for peer in landing.others] if own.numel() else [],
        [(peer, target[part.start : part.stop]) for peer, part in parts if len(part)],
    )


def _typed(storage: Tensor, offset: int, elements: int, dtype: torch.dtype) -> Tensor:
    return storage[offset : offset + elements * dtype.itemsize].view(dtype)


def _cut(part: Range, size: int) -> Iterator[Range]:
    for start in range(part.start, part.stop, size):
        yield Range(start, min(start + size, part.stop))


def _even(parts: tuple[Range, ...]) -> bool:
    return len({len(part) for part in parts}) == 1 and all(a.stop == b.start for a, b in pairwise(parts))
