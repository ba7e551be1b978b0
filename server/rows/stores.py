"""Which stores this database has used: the mark of each, by its url. Kept for ever as a lease of that name."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from server.db import Tx
from server.models import Lease
from server.rows.leases import FOR_EVER

PREFIX = "store "


async def marks(connection: AsyncConnection) -> Mapping[str, str]:
    """Mark of each store, by url."""
    statement = select(Lease.name, Lease.holder).where(Lease.name.startswith(PREFIX))
    return {row.name.removeprefix(PREFIX): row.holder for row in (await connection.execute(statement)).all()}


async def note(tx: Tx, url: str, mark: str) -> None:
    """The store of `url` has this mark: noted once."""
    noted = {"name": PREFIX + url, "holder": mark, "epoch": 1, "expires_at": tx.now + FOR_EVER}
    await tx.execute(tx.insert(Lease).values(**noted).on_conflict_do_nothing(index_elements=["name"]))
