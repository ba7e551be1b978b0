"""What carries a group's messages: gloo pairs of the engine's own (`gloo_wire.py`), NCCL, or nothing at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from zero_engine.errors import PeerError

_UNHEARD = "; the store where the ranks met is gone too, so that another rank may have failed first"
FOREVER = timedelta(0)  # torch's word for a wait without a limit of its own

Message = tuple[int, Tensor]  # the other rank of the group, and what goes there or comes from there


class PeerLost(RuntimeError):
    """The connection to a rank broke, or it was silent for longer than it may be."""

    def __init__(self, peer: int, error: Exception) -> None:
        words, _, _ = str(error).partition("\n")
        super().__init__(f"rank {peer} failed: connection lost ({words})")


class Work(Protocol):
    """Messages under way."""

    def wait(self) -> Any:
        """What was to come is here. Raises RuntimeError when a peer is gone."""


class Wire(Protocol):
    """Starts messages; every receive has its send on the other side, about the same and in the same order.

    Messages belong to requests. Bytes that were sent from a buffer may be written again after `settle`.
    """

    def begin(self, buffer: int) -> int:
        """A request that sends from buffer number `buffer`: its number."""

    def start(self, request: int, sends: Sequence[Message], receives: Sequence[Message], about: str) -> Sequence[Work]:
        """Returns at once. Ranks that have come to messages about other things than this one never meet in one."""

    def tell(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sequence[Work]:
        """As `start`, for a few bytes whose tensors nobody writes again, ahead of the next request."""

    def arrived(self, request: int) -> None:
        """This rank has waited for all messages of a request, and for the words before it."""

    def settle(self, buffer: int) -> None:
        """Wait until the others have what was sent from a buffer. Raises RuntimeError when a peer is gone."""

    def gather(self, target: Tensor, own: Tensor) -> bool:
        """All ranks' equal parts into `target`, where the wire has a faster way than messages; else False."""

    def end(self) -> None:
        """This rank begins nothing more: returns when it may go without taking bytes with it that others need."""

    def cut(self) -> None:
        """Close the connections, so that waiting ranks wake up."""


class NoWire:
    """A group of one."""

    def begin(self, buffer: int) -> int:
        return 0

    def start(self, request: int, sends: Sequence[Message], receives: Sequence[Message], about: str) -> Sequence[Work]:
        assert not sends and not receives
        return ()

    def tell(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sequence[Work]:
        return ()

    def arrived(self, request: int) -> None:
        """Nobody sent anything."""

    def settle(self, buffer: int) -> None:
        """Nobody reads it."""

    def gather(self, target: Tensor, own: Tensor) -> bool:
        return False

    def end(self) -> None:
        """Nobody waits."""

    def cut(self) -> None:
        """Nobody waits."""


class NcclWire:
    """One grouped launch per start; even gathers as `all_gather_into_tensor`.

    What leaves is waited for with what arrives, on the stream: later kernels may write where it was sent from.
    """

    def __init__(self, group: Any, ranks: int) -> None:
        self._group, self._global = group, [dist.get_global_rank(group, rank) for rank in range(ranks)]

    def begin(self, buffer: int) -> int:
        return 0

    def start(self, request: int, sends: Sequence[Message], receives: Sequence[Message], about: str) -> Sequence[Work]:
        operations = [dist.P2POp(dist.isend, tensor, self._global[peer], self._group) for peer, tensor in sends]
        operations += [dist.P2POp(dist.irecv, tensor, self._global[peer], self._group) for peer, tensor in receives]
        return dist.batch_isend_irecv(operations) if operations else ()

    def tell(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sequence[Work]:
        return self.start(0, sends, receives, "")

    def arrived(self, request: int) -> None:
        """The streams are in order."""

    def settle(self, buffer: int) -> None:
        """The streams are in order."""

    def gather(self, target: Tensor, own: Tensor) -> bool:
        dist.all_gather_into_tensor(target, own, group=self._group)
        return True

    def end(self) -> None:
        """NCCL's own end waits for its streams."""

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

    def heard(self) -> str | None:
        """What was said, or nothing; None where the store is gone too."""
        try:
            return str(self._store.get("bell").decode()) if self._store.check(["bell"]) else ""
        except (RuntimeError, AttributeError):
            return None


@dataclass(frozen=True)
class PeersNamed:
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


def meeting_place(group: Any) -> Any:
    """A part of the default store that only this engine's ranks use."""
    name: list[Any] = [os.urandom(8).hex()]
    dist.broadcast_object_list(name, dist.get_global_rank(group, 0), group)
    store = dist.distributed_c10d._get_default_store()
    prefix: Any = getattr(dist, "PrefixStore")  # noqa: B009  not in torch's list of exports
    return prefix(f"zero_engine/{name[0]}", store)
