"""Messages over gloo pairs, and receipts for them: when sent bytes may be written again, and a process may end.

Note: why receipts. A send that gloo starts just as its peer dies is forgotten without an error, and waiting for it
would take for ever; a receive is not. So nothing here waits for a send. A rank that has taken all messages of a request
tells every other rank so with a byte of its own tag, and that byte is waited for only where it is needed: before the
buffer that the request sent from is written again (`settle`), and before the process ends (`end`).

What is sent stands in one of two places. Bulk bytes stand in a `Buffer`, whose request keeps them alive until it is
settled. Words stand in tensors of their own, which nobody writes again and the next request keeps: a rank that gives a
receipt has compared all words before it. Received bytes lie in staging or in a target, from which nothing is sent.

Note: why two connections. gloo writes in the thread that sends, and holds the pair's lock while it does; the thread
that receives finds the lock taken and asks again and again, at the cost of a core. So bytes from a lower to a higher
rank and bytes from a higher to a lower one travel on connections of their own, each with the receipts for them.

Note: why subjects. A message of another size than its receive ends the process inside gloo. Ranks that have come to
different units send under different tags, so that nothing meets, and the words say who is where.

Note: why no rank waits in a circle. All ranks call everything in the same order, and a receipt for a request is given
where its messages are waited for. `settle` waits for requests that this rank has waited for already, so every rank
waits for others to pass a point that lies behind itself.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from zero_engine.errors import PeerError
from zero_engine.loopback import unpaced
from zero_engine.wire import FOREVER, Message, PeerLost
from zero_engine.yielding import yielding

END_SECONDS = 10.0  # that a rank waits at its end for others to take what it sent
_LANES = 2  # connections between two ranks: one for each direction
_KEPT = 64  # requests of a buffer that is never written again: no rank is so far behind
_NUMBERS = 1 << 20  # requests until a receipt's tag comes again
_CUT = _NUMBERS + 1  # of a message that nobody sends
_FIRST_SUBJECT, _SUBJECTS = _NUMBERS + 2, 1 << 20


class GlooWork:
    """Receives, each with the rank that sends; and sends, which are kept but never waited for."""

    def __init__(self, receives: list[tuple[int, Any]], sends: list[Any]) -> None:
        self._expected, self._sends = receives, sends

    def wait(self, timeout: timedelta = FOREVER) -> None:
        """Raises PeerLost when a peer is gone, or after `timeout`, which closes all connections."""
        while self._expected:
            peer, work = self._expected.pop(0)
            try:
                work.wait(timeout)
            except RuntimeError as error:
                raise PeerLost(peer, error) from error

    def finish(self, until: float) -> None:
        """Wait until then (monotonic seconds) at most; what a peer that is gone was to send is not waited for."""
        while self._expected:
            with suppress(RuntimeError):
                self.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))


@dataclass
class _Request:
    """Messages that are thanked for together."""

    number: int
    receipts: GlooWork  # from every other rank
    works: list[GlooWork]  # its own, and the words since the request before
    arrived: bool = False  # all that this rank expects of it


class GlooWire:
    """Pairs of the engine's own: its messages meet nobody else's, and it can cut them off alone."""

    def __init__(self, store: Any, rank: int, ranks: int, interface: str | None) -> None:
        gloo: Any = dist.ProcessGroupGloo
        with unpaced(), yielding():
            options = gloo._Options()
            device = gloo.create_device(interface=interface) if interface else gloo.create_default_device()
            options._devices = [device] * _LANES
            options._timeout = timedelta(minutes=30)
            self._pairs: Any = gloo(store, rank, ranks, options)
        self._rank = rank
        self._others = [peer for peer in range(ranks) if peer != rank]
        self._number = 0  # of requests so far
        self._sent: dict[int, deque[_Request]] = defaultdict(deque)  # by buffer, not settled yet
        self._open: dict[int, _Request] = {}  # by number, not thanked for yet
        self._words = list[GlooWork]()  # since the last request
        self._thanks = deque[list[Any]](maxlen=_KEPT)  # by request; long before so many more, the peers have them
        self._byte = torch.zeros(1, dtype=torch.uint8)

    def begin(self, buffer: int) -> int:
        self._trim(self._sent[buffer])
        self._number = number = self._number % _NUMBERS + 1
        receipts = [
            self._receive(torch.empty_like(self._byte), peer, self._tag(self._rank, peer, number))
            for peer in self._others
        ]
        request = _Request(number, GlooWork(receipts, []), self._words)
        self._words = []
        self._open[number] = request
        self._sent[buffer].append(request)
        return number

    def start(
        self, request: int, sends: Sequence[Message], receives: Sequence[Message], about: str
    ) -> Sequence[GlooWork]:
        work = self._started(sends, receives, _FIRST_SUBJECT + crc32(about.encode()) % _SUBJECTS)
        self._open[request].works.append(work)
        return (work,)

    def tell(self, sends: Sequence[Message], receives: Sequence[Message]) -> Sequence[GlooWork]:
        work = self._started(sends, receives)
        self._words.append(work)
        return (work,)

    def _started(self, sends: Sequence[Message], receives: Sequence[Message], number: int = 0) -> GlooWork:
        expected = [self._receive(tensor, peer, self._tag(peer, self._rank, number)) for peer, tensor in receives]
        sent = [self._send(tensor, peer, self._tag(self._rank, peer, number)) for peer, tensor in sends]
        return GlooWork(expected, sent)

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> tuple[int, Any]:
        try:
            return peer, self._connected().recv([tensor], peer, tag)
        except RuntimeError as error:
            raise PeerLost(peer, error) from error

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        try:
            return self._connected().send([tensor], peer, tag)
        except RuntimeError as error:
            raise PeerLost(peer, error) from error

    def _tag(self, source: int, target: int, number: int = 0) -> int:
        """Of messages from one rank to another: words (0), receipts of a request, or data about a subject. Receipts go
        on the connection of what they are for. gloo's connections take turns by tag.
        """
        return _LANES * number + (source > target)

    def arrived(self, request: int) -> None:
        self._open.pop(request).arrived = True
        self._thanks.append(
            [self._send(self._byte, peer, self._tag(peer, self._rank, request)) for peer in self._others]
        )

    def settle(self, buffer: int) -> None:
        for request in self._sent.pop(buffer, ()):
            assert request.arrived, request.number
            request.receipts.wait()

    def _trim(self, requests: deque[_Request]) -> None:
        """Settle what is so old that everybody has it."""
        while len(requests) >= _KEPT and requests[0].arrived:
            requests.popleft().receipts.wait()

    def _connected(self) -> Any:
        if self._pairs is None:
            raise PeerError("this rank has left the group after an error")
        return self._pairs

    def gather(self, target: torch.Tensor, own: torch.Tensor) -> bool:
        return False  # gloo's own is three times slower than messages

    def end(self) -> None:
        """Take and thank for what has been begun, then wait for the receipts of what was sent; quiet and bounded."""
        pairs, until = self._pairs, time.monotonic() + END_SECONDS
        if pairs is None:
            return
        for request in (*self._open.values(),):
            for work in request.works:
                work.finish(until)
            for peer in self._others:
                with suppress(RuntimeError):  # this one is gone, the others may wait
                    tag = self._tag(peer, self._rank, request.number)
                    self._thanks.append([pairs.send([self._byte], peer, tag)])
        self._open.clear()
        for request in [request for requests in self._sent.values() for request in requests]:
            request.receipts.finish(until)
        self._sent.clear()

    def cut(self) -> None:
        """gloo's own abort closes nothing, but a receive that is not answered in time closes every connection."""
        for lane in range(_LANES if self._pairs is not None else 0):
            with suppress(RuntimeError):
                tag = _LANES * _CUT + lane
                self._pairs.recv([self._byte], self._others[0], tag).wait(timedelta(milliseconds=1))
        self._pairs = None
        self._open.clear()
        self._sent.clear()
