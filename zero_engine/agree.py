"""A few words from every rank to every rank: how a collective save or load ends the same way everywhere."""

from __future__ import annotations

import torch

from zero_engine.comm import Comm, Gather
from zero_engine.layout import Range
from zero_engine.mail import mark_of

MESSAGE_BYTES = 1024  # longer texts are cut


class Agreement:
    """Collective calls on the training group; made with the engine, so that a rank that calls alone is told so."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm = comm
        self._own = comm.allocate("agreement", [MESSAGE_BYTES] * comm.ranks)
        self._all = torch.zeros(MESSAGE_BYTES * comm.ranks, dtype=torch.uint8, device=device)

    def tell(self, text: str, topic: str) -> list[str]:
        """Say something and hear what every rank says, in rank order. Ranks at different topics are DivergedError."""
        data = bytearray(text.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0"))
        self._comm.reclaim(self._own)
        self._own.local.copy_(torch.frombuffer(data, dtype=torch.uint8))
        self._comm.publish(self._own, topic)
        places = [Range(rank * MESSAGE_BYTES, (rank + 1) * MESSAGE_BYTES) for rank in range(self._comm.ranks)]
        gather = Gather((Range(0, MESSAGE_BYTES),) * self._comm.ranks, tuple(places), topic)
        self._comm.gather(self._own, gather, self._all, "agreement")
        self._comm.release(self._own)
        heard = bytes(self._all.cpu().tolist())
        return [heard[place.start : place.stop].rstrip(b"\0").decode(errors="ignore") for place in places]

    def difference(self, value: object, shown: str, topic: str) -> str:
        """Compare what every rank has: empty, or rank 0's and the first that is not the same, as they are shown."""
        said = self.tell(f"{mark_of(value)} {shown}", topic)
        for rank, words in enumerate(said):
            if words != said[0]:
                first, other = (text.partition(" ")[2] for text in (said[0], words))
                return f"{first} on rank 0 and {other} on rank {rank}"
        return ""

    def first(self, text: str, topic: str) -> str:
        """The first text that is not empty, with its rank; empty when no rank has anything to say."""
        said = self.tell(text, topic)
        return next((f"rank {rank}: {words}" for rank, words in enumerate(said) if words), "")
