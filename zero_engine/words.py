"""What the ranks of a group tell each other about where they are, so that those that ran different code hear of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_engine.comm import diverged
from zero_engine.wire import PeersNamed, Wire, Work

_LABEL_BYTES = 96


@dataclass(frozen=True)
class _Word:
    """Where this rank says that it is, and what the others will have said."""

    label: str
    own: Tensor  # 1-D uint8
    heard: Tensor  # (ranks, label bytes) uint8; the own row is not used
    works: Sequence[Work]


class Words:
    """Labels that travel ahead of the data, and are compared when the data is needed."""

    def __init__(self, wire: Wire, rank: int, ranks: int, guard: PeersNamed) -> None:
        self._wire, self._rank, self._ranks, self._guard = wire, rank, ranks, guard
        self._others = [peer for peer in range(ranks) if peer != rank]
        self._open = deque[_Word]()  # said, not yet compared
        self.said = self._compared = 0

    def say(self, label: str) -> None:
        """Returns at once; all ranks say as many words, in the same order where they run the same code."""
        text = label.encode()[:_LABEL_BYTES].ljust(_LABEL_BYTES)
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        heard = torch.empty(self._ranks, _LABEL_BYTES, dtype=torch.uint8)
        sends = [(peer, own) for peer in self._others]
        with self._guard:
            works = self._wire.tell(sends, [(peer, heard[peer]) for peer in self._others])
        self._open.append(_Word(label, own, heard, works))
        self.said += 1

    def compare(self, number: int) -> None:
        """Raises DivergedError unless the first `number` words were the same on all ranks."""
        while self._compared < number:
            word = self._open.popleft()
            with self._guard:
                for work in word.works:
                    work.wait()
            for peer in self._others:
                if not torch.equal(word.heard[peer], word.own):
                    theirs = bytes(word.heard[peer].tolist()).decode(errors="replace").strip()
                    raise diverged(self._rank, word.label, peer, theirs)
            self._compared += 1


class Silence:
    """Nobody else is there; or this is a GPU, where comparing costs a wait and NCCL's own watchdog has to do."""

    said = 0

    def say(self, label: str) -> None:
        """Nobody hears it."""

    def compare(self, number: int) -> None:
        """Nobody said anything."""
