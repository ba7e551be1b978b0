"""`Comm` over a torch process group: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_engine.comm import Buffer, Exchange, Gather, Ledger, sent_in_exchange, sent_in_gather
from zero_engine.layout import Range

Group = dist.ProcessGroup


class GroupComm:
    """Point-to-point messages in slices that fit the reserved staging, the next slice under way while one is summed.

    gloo's own reduce-scatter and all-reduce are three to four times slower than this exchange, and sum in an order of
    their own; NCCL runs the same messages as one grouped launch, and `all_gather_into_tensor` where shards are even.
    A group of one rank sends nothing and needs no torch.distributed.
    """

    name = "group"

    def __init__(self, group: Group | None, rank: int, ranks: int, device: torch.device) -> None:
        self.rank, self.ranks, self.ledger = rank, ranks, Ledger()
        self._group, self._device, self._slice = group, device, 1  # elements of a slice
        self._room = 0  # bytes for an arriving one
        self._nccl = ranks > 1 and device.type == "cuda"
        self._global = [dist.get_global_rank(group, r) if group is not None else r for r in range(ranks)]
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)  # two sets of one slice per peer
        self._buffers = 0

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
        operations, pieces = list[Any](), list[Tensor | None]([None] * self.ranks)
        for peer in range(self.ranks):
            if peer == self.rank:
                continue
            if own is not None and number < len(slices[peer]):
                part = slices[peer][number]
                operations.append(self._message(dist.isend, own[part.start : part.stop], peer))
            dtype = dtypes[peer]
            if dtype is not None and number < len(slices[self.rank]):
                place = (peer - (peer > self.rank) + (self.ranks - 1) * (number % 2)) * self._room
                piece = _typed(self._staging, place, len(slices[self.rank][number]), dtype)
                operations.append(self._message(dist.irecv, piece, peer))
                pieces[peer] = piece
        return dist.batch_isend_irecv(operations) if operations else [], pieces

    def _finish(self, posted: tuple[list[Any], list[Tensor | None]]) -> list[Tensor | None]:
        for work in posted[0]:
            work.wait()
        return posted[1]

    def _message(self, operation: Any, tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, self._global[peer], self._group)

    def gather(self, buffer: Buffer, request: Gather, target: Tensor, purpose: str) -> None:
        with self.ledger.timed("gather", purpose, sent_in_gather(request, self.rank)):
            source, place = request.sources[self.rank], request.targets[self.rank]
            own = buffer.local[source.start : source.stop]
            if self._nccl and _even(request.targets):
                whole = target[request.targets[0].start : request.targets[-1].stop]
                dist.all_gather_into_tensor(whole, own, group=self._group)
                return
            works = self._gather_messages(own, request, target)
            if own.data_ptr() != target[place.start :].data_ptr():
                target[place.start : place.stop].copy_(own)
            for work in works:
                work.wait()

    def _gather_messages(self, own: Tensor, request: Gather, target: Tensor) -> list[Any]:
        operations = list[Any]()
        for peer in range(self.ranks):
            if peer != self.rank:
                if own.numel():
                    operations.append(self._message(dist.isend, own, peer))
                if len(part := request.targets[peer]):
                    operations.append(self._message(dist.irecv, target[part.start : part.stop], peer))
        return dist.batch_isend_irecv(operations) if operations else []

    def note(self, text: str) -> None:
        """The others see the closed connection; the launcher shows this rank's own error."""

    def close(self, error: str | None = None) -> None:
        self._staging = torch.empty(0, dtype=torch.uint8)


def _typed(storage: Tensor, offset: int, elements: int, dtype: torch.dtype) -> Tensor:
    return storage[offset : offset + elements * dtype.itemsize].view(dtype)


def _slices(part: Range, size: int) -> Iterator[Range]:
    for start in range(part.start, part.stop, size):
        yield Range(start, min(start + size, part.stop))


def _even(parts: tuple[Range, ...]) -> bool:
    return len({len(part) for part in parts}) == 1 and all(a.stop == b.start for a, b in pairwise(parts))
