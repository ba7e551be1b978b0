"""The store above the jobs' folders, and its mark: what tells it from the empty place where a disk is not mounted.

Note: why a store has a mark
A folder without files says nothing: the disk may be away, or nothing was ever written. So the first launch into a store
writes a small file at its top, and the database notes what stands in it. From then on a store without that mark is
away: nothing starts, nothing is written, nothing is judged. A store with it is there, and what is not in it is gone.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from server.db import Database
from server.rows import checkpoints, stores
from server.settings import Settings
from zero_engine.store import NotFound, Store, StoreAway

MARK_FILE = "shardyard-store"
OpenStore = Callable[[str], Store]


@dataclass(frozen=True)
class WholeStore:
    """The store as this database knows it."""

    top: Store
    mark: str | None = None  # None: never used, or only before stores had marks
    others: bool = False  # the database has used other stores too
    used: bool = False  # the database has checkpoints, wherever they are

    def is_there(self) -> bool:
        """Whether this is the one store that all was written to: what is not in it is gone. Raises StoreError."""
        return self.mark is not None and not self.others and _read(self.top) == self.mark

    def settle(self) -> str:
        """The mark of the store, written if it is new. Raises StoreError, StoreAway if it is not what it was."""
        found = _read(self.top)
        if found is None and self.mark is not None:
            raise StoreAway(
                f"{self.top.url} lacks the file {MARK_FILE} that was written to it; is it mounted? "
                "If this is the store, make an empty file of that name there"
            )
        if found is None and self.used and not self.others and next(iter(self.top.folders()), None) is None:
            raise StoreAway(f"there is nothing in {self.top.url}, and there were checkpoints; is it mounted?")
        if not found:
            found = self.mark or secrets.token_hex(8)
            self.top.put(MARK_FILE, f"{found}\n".encode())
        if self.mark not in (None, found):
            raise StoreAway(
                f"{self.top.url} is another store than before; is the right one mounted? "
                f"To go on with this one, empty the file {MARK_FILE} in it"
            )
        return found


async def whole_store(database: Database, settings: Settings, open_store: OpenStore) -> WholeStore:
    """The store of the settings, as the database knows it."""
    async with database.read() as connection:
        marks = await stores.marks(connection)
        used = await checkpoints.any_exists(connection)
    top = open_store(settings.store)
    return WholeStore(top, marks.get(top.url), bool(marks.keys() - {top.url}), used)


def _read(top: Store) -> str | None:
    """What the mark says, empty for an empty file; None without one."""
    try:
        return top.get(MARK_FILE).decode(errors="replace").strip()
    except NotFound:
        return None
