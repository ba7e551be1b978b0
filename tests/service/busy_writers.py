"""`python -m tests.service.busy_writers URL WRITERS WRITES`: writers of one process, engines of their own."""

from __future__ import annotations

import asyncio
import sys

from sqlalchemy import insert

from server.db import Database
from server.models import Event


async def _write(url: str, writes: int) -> None:
    database = Database.open(url)
    for index in range(writes):
        async with database.write() as tx:
            await tx.execute(insert(Event).values(at=tx.now, action="x", actor="y", message=str(index), data={}))
            tx.changed("events")
    await database.close()


async def _main(url: str, writers: int, writes: int) -> None:
    await asyncio.gather(*(_write(url, writes) for _ in range(writers)))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
