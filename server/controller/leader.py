"""Which controller may act: the holder of the lease "controller".

Every transaction of the controller checks the lease at the epoch at which it was taken, so that a controller that slept
through its own end writes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from server.db import Database, Tx
from server.rows import leases

LEASE = "controller"


class LeaseLost(Exception):
    """Another controller leads: nothing was written."""


class Leadership:
    """The lease as this controller holds it."""

    def __init__(self, database: Database, holder: str, seconds: float) -> None:
        self._database = database
        self._holder = holder
        self._seconds = seconds
        self._held: leases.HeldLease | None = None
        self._renew_at = database.now()

    @property
    def epoch(self) -> int:
        """The epoch of the last acquired lease; 0 before the first."""
        return self._held.epoch if self._held else 0

    async def acquire(self) -> bool:
        """Take the lease, or renew it when a third of its time is gone. False: another holds it."""
        if self._held is not None and self._database.now() < self._renew_at:
            return True

        async def take(tx: Tx) -> leases.HeldLease | None:
            return await leases.acquire(tx, LEASE, self._holder, self._seconds)

        self._held = await self._database.transact(take)
        self._renew_at = self._database.now() + timedelta(seconds=self._seconds / 3)
        return self._held is not None

    @asynccontextmanager
    async def write(self) -> AsyncIterator[Tx]:
        """A write transaction that happens only while the lease is ours. Raises LeaseLost."""
        async with self._database.write() as tx:
            if self._held is None or not await leases.check(tx, self._held):
                self._held = None
                raise LeaseLost(self._holder)
            yield tx

    async def release(self) -> None:
        """Let the next controller lead at once."""
        async with self._database.write() as tx:
            await leases.release(tx, LEASE, self._holder)
        self._held = None
