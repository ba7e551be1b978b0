"""Leases: a right that expires, held by one. `epoch` grows with every new holder: it fences the old one."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.models import Lease

INSTALLATION = "installation"
FOR_EVER = timedelta(days=36_500)


@dataclass(frozen=True)
class HeldLease:
    """A lease as it stands."""

    name: str
    holder: str
    epoch: int
    expires_at: datetime


async def acquire(tx: Tx, name: str, holder: str, seconds: float) -> HeldLease | None:
    """Take the lease when it is free, expired or already ours (then it is renewed); None while another holds it."""
    until = tx.now + timedelta(seconds=seconds)
    inserted = await tx.execute(
        tx.insert(Lease)
        .values(name=name, holder=holder, epoch=1, expires_at=until)
        .on_conflict_do_nothing(index_elements=["name"])
        .returning(Lease.name)
    )
    if inserted.one_or_none() is not None:
        return HeldLease(name, holder, 1, until)
    if await renew(tx, name, holder, seconds):
        return await read(tx.connection, name)
    taken = await tx.execute(
        update(Lease)
        .where(Lease.name == name, Lease.expires_at <= tx.now)
        .values(holder=holder, epoch=Lease.epoch + 1, expires_at=until)
    )
    return await read(tx.connection, name) if taken.rowcount == 1 else None


async def renew(tx: Tx, name: str, holder: str, seconds: float) -> bool:
    """Prolong our own lease, also an expired one that nobody took; False when another holds it."""
    renewed = await tx.execute(
        update(Lease)
        .where(Lease.name == name, Lease.holder == holder)
        .values(expires_at=tx.now + timedelta(seconds=seconds))
    )
    return renewed.rowcount == 1


async def installation(tx: Tx) -> str:
    """A short text that stands for this database and for no other: made once, kept for ever as a lease of that name."""
    made = {"name": INSTALLATION, "holder": secrets.token_hex(6), "epoch": 1, "expires_at": tx.now + FOR_EVER}
    await tx.execute(tx.insert(Lease).values(**made).on_conflict_do_nothing(index_elements=["name"]))
    kept = await read(tx.connection, INSTALLATION)
    assert kept is not None, INSTALLATION
    return kept.holder


async def release(tx: Tx, name: str, holder: str) -> None:
    """Let our own lease expire now."""
    await tx.execute(update(Lease).where(Lease.name == name, Lease.holder == holder).values(expires_at=tx.now))


async def read(connection: AsyncConnection, name: str) -> HeldLease | None:
    """The lease as it stands, also when expired; None if nobody ever held it."""
    row = (await connection.execute(select(Lease.__table__).where(Lease.name == name))).one_or_none()
    return None if row is None else HeldLease(row.name, row.holder, row.epoch, row.expires_at)


async def check(tx: Tx, lease: HeldLease) -> bool:
    """Whether `lease` is still ours at this epoch, kept so until the transaction ends."""
    statement = (
        select(Lease.epoch).where(Lease.name == lease.name, Lease.holder == lease.holder).with_for_update(read=True)
    )
    row = (await tx.execute(statement)).one_or_none()
    return row is not None and row.epoch == lease.epoch
