"""What carries a group's messages: gloo pairs of the engine's own, NCCL, or nothing at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from zero_engine.errors import PeerError

Message = tuple[int, Tensor]  # the other rank of the group, and what goes there or comes from there


class Wire(Protocol):
    """Starts messages; every receive has its send on the other side, in the same order."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Any]:
        """Works to wait for."""

    def gather(self, target: Tensor, own: Tensor) -> bool:
        """All ranks' equal parts into `target`, where the wire has a faster way than messages; else False."""

    def cut(self) -> None:
        """Close the connections, so that waiting ranks wake up."""


class NoWire:
    """A group of one."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Any]:
        assert not sends and not receives
        return []

    def gather(self, target: Tensor, own: Tensor) -> bool:
        return False

    def cut(self) -> None:
        """Nobody waits."""


class GlooWire:
    """Pairs of the engine's own: its messages meet nobody else's, and it can cut them off alone."""

    def __init__(self, store: Any, rank: int, ranks: int, interface: str | None) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(interface=interface) if interface else gloo.create_default_device()]
        options._timeout = timedelta(minutes=30)
        self._pairs: Any = gloo(store, rank, ranks, options)

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Any]:
        if self._pairs is None:
            raise PeerError("this rank has left the group after an error")
        works = [self._pairs.send([tensor], peer, 0) for peer, tensor in sends]
        return works + [self._pairs.recv([tensor], peer, 0) for peer, tensor in receives]

    def gather(self, target: Tensor, own: Tensor) -> bool:
        return False  # gloo's own is three times slower than messages

    def cut(self) -> None:
        self._pairs = None


class NcclWire:
    """One grouped launch per start; even gathers as `all_gather_into_tensor`."""

    def __init__(self, group: Any, ranks: int) -> None:
        self._group, self._global = group, [dist.get_global_rank(group, rank) for rank in range(ranks)]

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Any]:
        operations = [dist.P2POp(dist.isend, tensor, self._global[peer], self._group) for peer, tensor in sends]
        operations += [dist.P2POp(dist.irecv, tensor, self._global[peer], self._group) for peer, tensor in receives]
        return dist.batch_isend_irecv(operations) if operations else []

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
