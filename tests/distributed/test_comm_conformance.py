"""Both transports move the same bytes to the same places, and book the same."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.distributed.rank_pool import Pool, Rank
from zero_engine import ZeroConfig
from zero_engine.comm import Comm, Exchange, Gather
from zero_engine.group import comm_between, membership_of
from zero_engine.layout import Range

LENGTH = 1000


def _comm(rank: Rank, transport: str) -> Comm:
    comm = comm_between(membership_of(rank.group), torch.device("cpu"), ZeroConfig(transport=transport))
    comm.reserve(torch.empty(2 * (rank.ranks - 1) * 4 * 64, dtype=torch.uint8), 64)
    return comm


def _owners(ranks: int) -> tuple[Range, ...]:
    """Uneven parts, one of them empty where there are three ranks or more."""
    cuts = [0, *(LENGTH // 2 + 7 * rank for rank in range(ranks - 1)), LENGTH]
    cuts[-2] = cuts[-3] if ranks > 2 else cuts[-2]
    return tuple(Range(start, stop) for start, stop in pairwise(cuts))


def _exchanged(rank: Rank, transport: str) -> Any:
    """Rank r's bucket holds 1000 r + i; the last rank has no piece, rank 0 sends bf16."""
    comm = _comm(rank, transport)
    dtypes: list[str | None] = ["bfloat16", *["float32"] * (rank.ranks - 2), None][: rank.ranks]
    seen: list[tuple[int, int, list[float | None]]] = []
    buffer = comm.allocate("bucket", [4 * LENGTH + 64] * rank.ranks)
    for turn in range(3):
        comm.reclaim(buffer)
        if (name := dtypes[rank.rank]) is not None:
            dtype = getattr(torch, name)
            values = (torch.arange(LENGTH) % 100 + 1000 * rank.rank + turn).to(dtype)
            buffer.local[64 : 64 + LENGTH * dtype.itemsize].view(dtype).copy_(values)
        comm.publish(buffer, f"turn {turn}")
        for part, pieces in comm.exchange(buffer, Exchange(64, _owners(rank.ranks), tuple(dtypes), "x"), "gradients"):
            assert all(piece is None or len(piece) == len(part) for piece in pieces)
            for place in range(len(part)):
                values_here = [None if piece is None else float(piece[place]) for piece in pieces]
                seen.append((turn, part.start + place, values_here))
        comm.release(buffer)
    booked = comm.ledger.report().bytes
    comm.close()
    return seen, booked


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_exchange_brings_every_piece_to_its_owner(pool: Pool, ranks: int) -> None:
    """Uneven and empty ranges, missing pieces, several dtypes, a buffer used again: equal on both transports."""
    shared, group = (pool.run(ranks, _exchanged, transport) for transport in ("shared", "group"))
    assert shared == group
    for rank, (seen, _) in enumerate(shared):
        assert [element for turn, element, _ in seen if turn == 0] == list(
            range(_owners(ranks)[rank].start, _owners(ranks)[rank].stop)
        )
        for turn, element, values in seen:
            for source, value in enumerate(values[:-1]):
                exact = torch.tensor(float(element % 100 + 1000 * source + turn))
                assert value == float(exact.to(torch.bfloat16) if source == 0 else exact)
            assert values[-1] is None


def _gathered(rank: Rank, transport: str) -> Any:
    comm = _comm(rank, transport)
    sizes = [10 * (peer + 1) for peer in range(rank.ranks)]
    buffer = comm.allocate("shards", sizes)
    buffer.local.fill_(rank.rank + 1)
    starts = [sum(sizes[:peer]) for peer in range(rank.ranks)]
    target = torch.zeros(sum(sizes), dtype=torch.uint8)
    comm.publish(buffer, "shards")
    targets = tuple(Range(start, start + size) for start, size in zip(starts, sizes, strict=True))
    comm.gather(buffer, Gather(tuple(Range(0, size) for size in sizes), targets, "shards"), target, "parameters")
    comm.release(buffer)
    booked = comm.ledger.report().bytes
    comm.close()
    return target.tolist(), booked


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gather_brings_every_shard_to_every_rank(pool: Pool, ranks: int) -> None:
    """Uneven shards; each rank books what it sends to the others."""
    for transport in ("shared", "group"):
        for rank, (values, booked) in enumerate(pool.run(ranks, _gathered, transport)):
            assert values == [peer + 1 for peer in range(ranks) for _ in range(10 * (peer + 1))]
            sent = 10 * (rank + 1) * (ranks - 1)
            assert booked == ({"gather/parameters": sent} if sent else {})
