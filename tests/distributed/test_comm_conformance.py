"""Both transports move the same bytes to the same places, and book the same; messages outlive their senders."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.delayed_comm import DelayedComm
from tests.distributed.rank_pool import Pool, Rank
from tests.waiting import stretched
from zero_engine import ZeroConfig
from zero_engine.comm import Comm, Exchange, Gather
from zero_engine.comm_group import GroupComm
from zero_engine.errors import PeerError
from zero_engine.gloo_wire import GlooWire
from zero_engine.group import comm_between, membership_of
from zero_engine.layout import Range
from zero_engine.loopback import sockets
from zero_engine.wire import Bell
from zero_engine.yielding import threads

LENGTH = 1000
MANY = 16 << 20  # bytes: more than sockets hold


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


LENGTHS = (40, 500, 100, 64, 0, 700, 30, 90)  # elements of buckets: within a slice of 64 for a rank, and more


def _two_under_way(rank: Rank, transport: str) -> list[float]:
    """Each bucket is begun before the one before is summed: the sum of what arrives, by bucket."""
    comm = _comm(rank, transport)
    starts = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
    buffer, requests = comm.allocate("buckets", [4 * sum(LENGTHS)] * rank.ranks), list[Exchange]()
    for number, (start, length) in enumerate(zip(starts, LENGTHS, strict=True)):
        cuts = [length * peer // rank.ranks for peer in range(rank.ranks + 1)]
        owners = tuple(Range(first, last) for first, last in pairwise(cuts))
        requests.append(Exchange(4 * start, owners, ("float32",) * rank.ranks, f"bucket {number}"))
    found = list[float]()
    for turn in range(2):
        comm.reclaim(buffer)
        buffer.local.view(torch.float32).copy_(torch.arange(sum(LENGTHS)) + 10000 * rank.rank + turn)
        comm.publish(buffer, f"turn {turn}")
        before: Any = ()
        for request in requests:
            arriving = comm.exchange(buffer, request, "gradients")
            found.append(sum(float(piece.sum()) for _, pieces in before for piece in pieces))
            before = arriving
        found.append(sum(float(piece.sum()) for _, pieces in before for piece in pieces))
        comm.release(buffer)
    comm.close()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_exchange_may_begin_before_the_one_before_is_summed(pool: Pool, ranks: int) -> None:
    """In the staging of one, whatever the buckets' sizes: where there is no room it begins when there is."""
    shared, group = (pool.run(ranks, _two_under_way, transport) for transport in ("shared", "group"))
    assert shared == group
    starts = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
    for turn in range(2):
        for number, (start, length) in enumerate(zip(starts, LENGTHS, strict=True)):
            every = [start + place + 10000 * rank + turn for rank in range(ranks) for place in range(length)]
            place = turn * (len(LENGTHS) + 1) + 1 + number
            assert sum(row[place] for row in group) == sum(every), number


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


def _most_counted(rank: Rank) -> tuple[int, bool]:
    """KiB that gathering MANY bytes of each other rank adds to this process's resident size at its peak, and whether
    all bytes came."""
    comm = _comm(rank, "shared")
    buffer, start = comm.allocate("unit", [MANY + 12345] * rank.ranks), 12345  # in the middle of a page
    buffer.local.fill_(rank.rank + 1)
    target = torch.zeros(rank.ranks * MANY, dtype=torch.uint8)
    targets = tuple(Range(peer * MANY, (peer + 1) * MANY) for peer in range(rank.ranks))
    comm.publish(buffer, "unit")
    Path("/proc/self/clear_refs").write_text("5")  # the high water mark starts again here
    before = _status("VmRSS")
    comm.gather(buffer, Gather((Range(start, start + MANY),) * rank.ranks, targets, "unit"), target, "parameters")
    most = _status("VmHWM") - before
    comm.release(buffer)
    comm.reclaim(buffer)
    comm.close()
    return most, bool((target.view(rank.ranks, MANY) == torch.arange(1, rank.ranks + 1).view(-1, 1)).all())


def _status(key: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0])


def test_a_gather_counts_no_more_than_a_bucket_of_the_others_bytes_as_its_own(pool: Pool) -> None:
    """Pages of others that were copied are dropped a bucket (4 MiB) at a time, however large the unit is."""
    for most_kib, came in pool.run(3, _most_counted):
        assert came
        assert most_kib < 6 << 10, f"{most_kib} KiB, of {2 * MANY >> 10} KiB of others"


def _rewritten(rank: Rank, transport: str) -> list[tuple[int, int]]:
    """Rank 0 sends to a rank that comes late, and writes again as soon as it may: (least, largest) byte by turn."""
    comm: Any = _comm(rank, transport)
    comm = DelayedComm(comm, seed=3) if rank.rank else comm
    comm.reserve(torch.empty(2 * 4 * (1 << 20), dtype=torch.uint8), 1 << 20)
    buffer, target, seen = comm.allocate("again", [MANY, 0]), torch.zeros(MANY, dtype=torch.uint8), []
    exchange = Exchange(0, (Range(0, 0), Range(0, MANY // 4)), ("float32", None), "x")
    gather = Gather((Range(0, MANY), Range(0, 0)), (Range(0, MANY), Range(MANY, MANY)), "x")
    for turn in range(4):
        comm.reclaim(buffer)
        buffer.local.fill_(turn + 1)
        comm.publish(buffer, f"turn {turn}")
        if turn % 2:
            comm.gather(buffer, gather, target, "parameters")
        else:
            for part, pieces in comm.exchange(buffer, exchange, "gradients"):
                target.view(torch.float32)[part.start : part.stop].copy_(pieces[0])
        comm.release(buffer)
        if rank.rank:
            seen.append((int(target.min()), int(target.max())))
    comm.close()
    return seen


@pytest.mark.parametrize("transport", ["group", "shared"])
def test_a_buffer_is_written_again_only_when_the_others_have_it(pool: Pool, transport: str) -> None:
    """A sender that receives nothing runs ahead as far as it can; the late reader still sees each turn's bytes."""
    assert pool.run(2, _rewritten, transport)[1] == [(turn, turn) for turn in (1, 2, 3, 4)]


def _apart(name: str, rank: int, ranks: int) -> tuple[GroupComm, Any]:
    """Messages between a few ranks of the pool, and where these meet."""
    prefix: Any = getattr(dist, "PrefixStore")  # noqa: B009  not in torch's list of exports
    store = prefix(f"{name} {os.getppid()}", dist.distributed_c10d._get_default_store())
    return GroupComm(GlooWire(store, rank, ranks, "lo"), rank, ranks, torch.device("cpu"), Bell(store)), store


def _congestion_controls(rank: Rank) -> set[bytes]:
    """Of the connections that a transport over messages makes."""
    before = sockets()
    comm, _ = _apart("paced", rank.rank, rank.ranks)
    found = set[bytes]()
    for descriptor in sockets() - before:
        with socket.socket(fileno=os.dup(descriptor)) as each, suppress(OSError):
            each.getpeername()  # one that listens has none
            found.add(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0"))
    comm.close()
    return found


def test_messages_within_a_host_are_not_paced(pool: Pool) -> None:
    """Whatever the system is set to: over loopback a pace costs timers and saves nothing."""
    assert pool.run(3, _congestion_controls) == [{b"reno"}] * 3


def _policies(rank: Rank) -> set[int]:
    """Of the threads that a transport over messages starts."""
    before = threads()
    comm, _ = _apart("yielding", rank.rank, rank.ranks)
    found = {os.sched_getscheduler(thread) for thread in threads() - before}
    comm.close()
    return found


def test_threads_that_carry_messages_interrupt_no_rank_that_computes(pool: Pool) -> None:
    """With more ranks than cores each interruption would cost two switches."""
    assert pool.run(2, _policies) == [{os.SCHED_BATCH}] * 2


def _left(rank: Rank) -> Any:
    return _leaves(*_apart("leaves", rank.rank, 2)) if rank.rank < 2 else _dies(*_apart("dies", rank.rank - 2, 3))


def _all_of(comm: GroupComm) -> tuple[Any, Gather, torch.Tensor]:
    """A published buffer of a byte value per rank, a gather of it, and where that goes."""
    buffer = comm.allocate("last", [MANY] * comm.ranks)
    buffer.local.fill_(comm.rank + 1)
    comm.publish(buffer, "last")
    places = tuple(Range(rank * MANY, (rank + 1) * MANY) for rank in range(comm.ranks))
    return buffer, Gather((Range(0, MANY),) * comm.ranks, places, "last"), torch.zeros(MANY * comm.ranks).byte()


def _leaves(comm: GroupComm, store: Any) -> list[int]:
    """Rank 1 ends as soon as it has begun to send, without a close; rank 0 comes later for the bytes."""
    buffer, gather, target = _all_of(comm)
    if comm.rank == 1:
        comm.fetch(buffer, gather, target, "parameters")
        store.set("left", "1")
        raise SystemExit
    store.wait(["left"])
    DelayedComm(comm, seed=1).gather(buffer, gather, target, "parameters")
    comm.close()
    return sorted(set(target.tolist()[:: MANY // 64]))


def _dies(comm: GroupComm, store: Any) -> tuple[str, float]:
    """Rank 1 dies before it has taken anything; rank 0 wants to write again, rank 2 to end."""
    buffer, gather, target = _all_of(comm)
    arrival = comm.fetch(buffer, gather, target, "parameters")
    if comm.rank == 1:
        store.wait(["0", "2"])
        os._exit(9)
    arrival.wait()
    start, text = time.monotonic(), ""
    store.set(str(comm.rank), "1")
    try:
        if comm.rank == 0:
            comm.reclaim(buffer)
    except PeerError as error:
        text = str(error)
    comm.close()
    return text, time.monotonic() - start


def test_who_ends_leaves_its_bytes_and_who_dies_leaves_no_one_waiting(pool: Pool) -> None:
    """A process that ends properly has first brought away what it sent. A death ends a reclaim with an error that names
    the rank, and a close at once and quietly.
    """
    outcomes = pool.outcomes(5, _left)
    pool.stop()
    assert outcomes[0] == (True, [1, 2]), outcomes[0]
    assert outcomes[2][1][0].startswith("rank 1 failed: connection lost"), outcomes[2]
    assert outcomes[4][1][0] == "", outcomes[4]
    assert all(outcomes[rank][1][1] < stretched(5) for rank in (2, 4)), outcomes
