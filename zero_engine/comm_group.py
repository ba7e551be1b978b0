"""`Comm` over a torch process group: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zero_engine.comm import Buffer, Exchange, Gather, Ledger, diverged, reason_of, sent_in_exchange, sent_in_gather
from zero_engine.errors import PeerError
from zero_engine.layout import Range
from zero_engine.wire import Bell, Message, Wire

_LABEL_BYTES = 96


class GroupComm:
    """Point-to-point messages in slices that fit the reserved staging, the next slice under way while one is summed.

    gloo's own reduce-scatter and all-reduce are three to four times slower than this exchange, and sum in an order of
    their own; NCCL runs the same messages as one grouped launch, and `all_gather_into_tensor` where shards are even.
    A group of one rank sends nothing and needs no torch.distributed.
    """

    name = "group"

    def __init__(self, wire: Wire, rank: int, ranks: int, device: torch.device, bell: Bell) -> None:
        self.rank, self.ranks, self.ledger = rank, ranks, Ledger()
        self._wire, self._device, self._slice = wire, device, 1  # elements of a slice
        self._room = 0  # bytes for an arriving one
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)  # two sets of one slice per peer
        self._buffers = 0
        self._bell = bell
        self._heads = torch.zeros(2 * ranks, _LABEL_BYTES, dtype=torch.uint8)  # labels sent and received

    def reserve(self, staging: Tensor, slice_elements: int) -> None:
        self._staging, self._slice = staging, slice_elements
        self._room = staging.numel() // max(1, 2 * (self.ranks - 1))

    def allocate(self, label: str, sizes: Sequence[int]) -> Buffer:
        self._buffers += 1
        return Buffer(self._buffers, label, torch.zeros(sizes[self.rank], dtype=torch.uint8, device=self._device))

    def reclaim(self, buffer: Buffer) -> None:
        """Messages were copied out when they were sent."""

    def publish(self, buffer: Buffer, label: str) -> None:
        buffer.published += 1
        self._check(label)

    def _check(self, label: str) -> None:
        """All ranks say where they are; on a GPU this would cost a wait, and NCCL's own watchdog has to do."""
        if self._device.type != "cpu" or self.ranks == 1:
            return
        text = label.encode()[:_LABEL_BYTES].ljust(_LABEL_BYTES)
        sent, heard = self._heads[: self.ranks], self._heads[self.ranks :]
        sent[self.rank].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        others = [peer for peer in range(self.ranks) if peer != self.rank]
        works = self._start([(peer, sent[self.rank]) for peer in others], [(peer, heard[peer]) for peer in others])
        self._wait(works)
        for peer in range(self.ranks):
            if peer != self.rank and not torch.equal(heard[peer], sent[self.rank]):
                raise diverged(self.rank, label, peer, bytes(heard[peer].tolist()).decode(errors="replace").strip())

    def release(self, buffer: Buffer) -> None:
        """Nothing is read from others."""

    def exchange(
        self, buffer: Buffer, request: Exchange, purpose: str
    ) -> Iterator[tuple[Range, list[Tensor | None]]]:
        dtypes = [None if name is None else getattr(torch, name) for name in request.dtypes]
        mine = dtypes[self.rank]
        own = None if mine is None else _typed(buffer.local, request.offset, request.owners[-1].stop, mine)
        sent = sent_in_exchange(request, self.rank, 0 if mine is None else mine.itemsize)
        slices = [list(_slices(part, self._slice)) for part in request.owners]
        count = max(map(len, slices))
        self.ledger.add("exchange", purpose, sent)
        posted = self._post(own, dtypes, slices, 0) if count else None
        for number in range(count):
            with self.ledger.timed("exchange", purpose, 0):
                assert posted is not None
                pieces = self._finish(posted)
            posted = self._post(own, dtypes, slices, number + 1) if number + 1 < count else None
            if number < len(slices[self.rank]):
                part = slices[self.rank][number]
                pieces[self.rank] = None if own is None else own[part.start : part.stop]
                yield part, pieces

    def _post(
        self, own: Tensor | None, dtypes: list[torch.dtype | None], slices: list[list[Range]], number: int
    ) -> tuple[list[Any], list[Tensor | None]]:
        """Start the messages of one slice number; (works, arriving pieces by rank)."""
        sends, receives = list[Message](), list[Message]()
        pieces: list[Tensor | None] = [None] * self.ranks
        for peer in range(self.ranks):
            if peer == self.rank:
                continue
            if own is not None and number < len(slices[peer]):
                part = slices[peer][number]
                sends.append((peer, own[part.start : part.stop]))
            dtype = dtypes[peer]
            if dtype is not None and number < len(slices[self.rank]):
                place = (peer - (peer > self.rank) + (self.ranks - 1) * (number % 2)) * self._room
                piece = _typed(self._staging, place, len(slices[self.rank][number]), dtype)
                receives.append((peer, piece))
                pieces[peer] = piece
        return self._start(sends, receives), pieces

    def _finish(self, posted: tuple[list[Any], list[Tensor | None]]) -> list[Tensor | None]:
        self._wait(posted[0])
        return posted[1]

    def _start(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Any]:
        with self._peers_named():
            return self._wire.start(sends, receives)

    def _wait(self, works: list[Any]) -> None:
        with self._peers_named():
            for work in works:
                work.wait()

    @contextmanager
    def _peers_named(self) -> Iterator[None]:
        """Raises PeerError with the reason when a rank is gone."""
        try:
            yield
        except RuntimeError as error:
            raise PeerError(self._bell.heard() or f"a rank of the group is gone: {error}") from error

    def gather(self, buffer: Buffer, request: Gather, target: Tensor, purpose: str) -> None:
        with self.ledger.timed("gather", purpose, sent_in_gather(request, self.rank)):
            if request.checked:
                self._check(request.label)
            source, place = request.sources[self.rank], request.targets[self.rank]
            own = buffer.local[source.start : source.stop]
            if _even(request.targets) and self._wire.gather(
                target[request.targets[0].start : request.targets[-1].stop], own
            ):
                return
            works = self._gather_messages(own, request, target)
            if own.data_ptr() != target[place.start :].data_ptr():
                target[place.start : place.stop].copy_(own)
            self._wait(works)

    def _gather_messages(self, own: Tensor, request: Gather, target: Tensor) -> list[Any]:
        others = [peer for peer in range(self.ranks) if peer != self.rank]
        parts = [(peer, request.targets[peer]) for peer in others]
        receives = [(peer, target[part.start : part.stop]) for peer, part in parts if len(part)]
        return self._start([(peer, own) for peer in others] if own.numel() else [], receives)

    def note(self, text: str) -> None:
        self._bell.ring(f"rank {self.rank} failed: {text}")

    def close(self, error: str | None = None) -> None:
        """With an error the connections are cut, which wakes every waiting rank; without, they end with this object."""
        self._staging = torch.empty(0, dtype=torch.uint8)
        if error is not None:
            self._bell.ring(reason_of(self.rank, error))
            self._wire.cut()


def _typed(storage: Tensor, offset: int, elements: int, dtype: torch.dtype) -> Tensor:
    return storage[offset : offset + elements * dtype.itemsize].view(dtype)


def _slices(part: Range, size: int) -> Iterator[Range]:
    for start in range(part.start, part.stop, size):
        yield Range(start, min(start + size, part.stop))


def _even(parts: tuple[Range, ...]) -> bool:
    return len({len(part) for part in parts}) == 1 and all(a.stop == b.start for a, b in pairwise(parts))
