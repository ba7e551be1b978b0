"""What carries a group's messages: gloo pairs of the engine's own, NCCL, or nothing at all."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from zero_engine.errors import PeerError

_KEPT = 1024  # sends; long before so many more, the peer has needed the first
_NUMBERS = 1 << 20  # starts until a receipt's number comes again

Message = tuple[int, Tensor]  # the other rank of the group, and what goes there or comes from there


class Work(Protocol):
    """Messages under way."""

    def wait(self) -> Any:
        """What was to come is here, and what was to leave has left. Raises RuntimeError when a peer is gone."""


class Wire(Protocol):
    """Starts messages; every receive has its send on the other side, in the same order."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sequence[Work]:
        """Returns at once."""

    def tell(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sequence[Work]:
        """As `start`, for a few bytes whose tensors nobody writes again."""

    def gather(self, target: Tensor, own: Tensor) -> bool:
        """All ranks' equal parts into `target`, where the wire has a faster way than messages; else False."""

    def cut(self) -> None:
        """Close the connections, so that waiting ranks wake up."""


class NoWire:
    """A group of one."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sequence[Work]:
        assert not sends and not receives
        return ()

    tell = start

    def gather(self, target: Tensor, own: Tensor) -> bool:
        return False

    def cut(self) -> None:
        """Nobody waits."""


class GlooWork:
    """Receives, and a receipt for every send: waits until all are here, and gives receipts for what came.

    Note: why receipts. A send that gloo starts just as its peer dies is forgotten without an error, and waiting for it
    would take for ever; a receive is not. So nothing here waits for a send. A receipt also says that a process may end.
    """

    def __init__(self, receives: list[Any], receipts: list[Any], thank: Callable[[], None]) -> None:
        self._expected, self._receipts, self._thank = receives, receipts, thank

    def wait(self) -> None:
        """Raises RuntimeError when a peer is gone."""
        while self._expected:
            self._expected.pop(0).wait()
        self._thank()
        while self._receipts:
            self._receipts.pop(0).wait()

    def drop(self) -> None:
        """Expect nothing more, so that the connections can be cut."""
        self._expected.clear()
        self._receipts.clear()


class GlooWire:
    """Pairs of the engine's own: its messages meet nobody else's, and it can cut them off alone."""

    def __init__(self, store: Any, rank: int, ranks: int, interface: str | None) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(interface=interface) if interface else gloo.create_default_device()]
        options._timeout = timedelta(minutes=30)
        self._pairs: Any = gloo(store, rank, ranks, options)
        self._number = 0  # of starts so far; receipts are told apart by it
        self._open: WeakSet[GlooWork] = WeakSet()
        self._sent = deque[Any](maxlen=_KEPT)  # sends that nobody waits for
        self._byte = torch.zeros(1, dtype=torch.uint8)

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sequence[Work]:
        pairs = self._connected()
        self._number = number = self._number % _NUMBERS + 1
        expected = [pairs.recv([tensor], peer, 0) for peer, tensor in receives]
        receipts = [pairs.recv([torch.empty_like(self._byte)], peer, number) for peer, _ in sends]
        self._sent.extend([pairs.send([tensor], peer, 0) for peer, tensor in sends])
        sources = [peer for peer, _ in receives]
        return self._kept(GlooWork(expected, receipts, lambda: self._thank(sources, number)))

    def tell(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sequence[Work]:
        pairs = self._connected()
        expected = [pairs.recv([tensor], peer, 0) for peer, tensor in receives]
        self._sent.extend([pairs.send([tensor], peer, 0) for peer, tensor in sends])
        return self._kept(GlooWork(expected, [], lambda: None))

    def _kept(self, work: GlooWork) -> Sequence[Work]:
        self._open.add(work)
        return (work,)

    def _thank(self, peers: Sequence[int], number: int) -> None:
        """Tell the senders of messages `number` that theirs have come."""
        pairs = self._connected()
        self._sent.extend([pairs.send([self._byte], peer, number) for peer in peers])

    def _connected(self) -> Any:
        if self._pairs is None:
            raise PeerError("this rank has left the group after an error")
        return self._pairs

    def gather(self, target: Tensor, own: Tensor) -> bool:
        return False  # gloo's own is three times slower than messages

    def cut(self) -> None:
        for work in self._open:
            work.drop()
        self._sent.clear()
        self._pairs = None


class NcclWire:
    """One grouped launch per start; even gathers as `all_gather_into_tensor`."""

    def __init__(self, group: Any, ranks: int) -> None:
        self._group, self._global = group, [dist.get_global_rank(group, rank) for rank in range(ranks)]

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sequence[Work]:
        operations = [dist.P2POp(dist.isend, tensor, self._global[peer], self._group) for peer, tensor in sends]
        operations += [dist.P2POp(dist.irecv, tensor, self._global[peer], self._group) for peer, tensor in receives]
        return dist.batch_isend_irecv(operations) if operations else ()

    tell = start

    def gather(self, target: Tensor, own: Tensor) -> bool:
        dist.all_gather_into_tensor(target, own, group=self._group)
        return True

    def cut(self) -> None:
        self._group.abort()


class Bell:
    """Where a failing rank leaves its reason: the store through which the ranks met."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def ring(self, text: str) -> None:
        """The first to ring is heard."""
        with suppress(RuntimeError, AttributeError):  # the rank that kept the store may be gone; a rank alone has none
            self._store.compare_set("bell", "", text)

    def heard(self) -> str:
        """What was said, or nothing."""
        with suppress(RuntimeError, AttributeError):
            if self._store.check(["bell"]):
                return str(self._store.get("bell").decode())
        return ""


def meeting_place(group: Any) -> Any:
    """A part of the default store that only this engine's ranks use."""
    name: list[Any] = [os.urandom(8).hex()]
    dist.broadcast_object_list(name, dist.get_global_rank(group, 0), group)
    store = dist.distributed_c10d._get_default_store()
    prefix: Any = getattr(dist, "PrefixStore")  # noqa: B009  not in torch's list of exports
    return prefix(f"zero_engine/{name[0]}", store)
