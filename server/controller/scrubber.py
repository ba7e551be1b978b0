"""Reads checkpoints back in the background and marks them verified or corrupt.

One shard at a time, no faster than the setting allows, and every shard that was read is written down: a controller that
is killed goes on behind it. It reads through the `Store` protocol alone; nothing here loads torch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial

from server.controller import checkpoint_files
from server.controller.leader import Leadership
from server.db import Database
from server.rows import readings
from server.rows.checkpoints import CheckpointRef
from server.rows.readings import GONE, Reading
from server.settings import Settings
from server.whole_store import OpenStore, whole_store
from zero_engine import catalog
from zero_engine.manifest import CheckpointError, Manifest, NotPublished, Shard
from zero_engine.store import Store, StoreError

log = logging.getLogger("shardyard.scrubber")
IDLE_SECONDS = 5.0  # between looks for something to read, when there was nothing
AWAY_SECONDS = 60.0  # after a store that did not answer


class _Stopped(Exception):
    """The controller stops: what was read of this shard is read again by the next."""


class Scrubber:
    """One reader. `work` reads what is due, one checkpoint a call; `stop` ends it within one piece."""

    def __init__(self, database: Database, settings: Settings, leadership: Leadership, open_store: OpenStore) -> None:
        self._database = database
        self._settings = settings
        self._leadership = leadership
        self._open_store = open_store
        self._stopping = threading.Event()
        self._look_at: datetime | None = None  # not before
        self._ready_at = 0.0  # on the monotonic clock: when the next piece may be read

    @property
    def is_due(self) -> bool:
        """Whether it is time to look for something to read."""
        if self._settings.scrub_bytes_per_second <= 0 or self._stopping.is_set():
            return False
        return self._look_at is None or self._database.now() >= self._look_at

    def stop(self) -> None:
        """Read no more. Safe from any thread."""
        self._stopping.set()

    async def work(self) -> bool:
        """Read one checkpoint that is due, if any, and mark it; whether there was one. Raises LeaseLost."""
        now = self._database.now()
        async with self._database.read() as connection:
            ref = await readings.next_due(connection, now - timedelta(days=self._settings.scrub_days))
            done = frozenset[int]() if ref is None else await readings.read_already(connection, ref)
        if ref is None:
            self._look_at = now + timedelta(seconds=IDLE_SECONDS)
            return False
        try:
            await self._read(ref, done)
        except StoreError as error:
            log.warning("scrub.store_away job=%s folder=%s error=%s", ref.job_id, ref.folder, error)
            self._look_at = now + timedelta(seconds=AWAY_SECONDS)
        except _Stopped:
            log.info("scrub.stopped job=%s folder=%s", ref.job_id, ref.folder)
        return True

    async def _read(self, ref: CheckpointRef, done: frozenset[int]) -> None:
        store = self._open_store(self._settings.job_store(ref.job_id))
        whole = await whole_store(self._database, self._settings, self._open_store)
        try:
            manifest = await asyncio.to_thread(checkpoint_files.read_manifest, store, ref.folder, whole)
        except CheckpointError as error:
            await self._conclude(ref, Reading((GONE if isinstance(error, NotPublished) else str(error),)))
            return
        require = partial(checkpoint_files.require, store, whole)
        problems = [
            problem
            for shard in manifest.shards
            if shard.rank not in done
            for problem in await self._shard(ref, store, shard, require)
        ]
        async with self._database.read() as connection:
            bad = await readings.bad_ranks(connection, ref.id)
        earlier = [_of_rank(manifest, rank) for rank in sorted(bad) if rank in done]
        await self._conclude(ref, Reading((*earlier, *problems), bad))

    async def _shard(self, ref: CheckpointRef, store: Store, shard: Shard, require: Callable[[], None]) -> list[str]:
        damage = await asyncio.to_thread(catalog.verify_shard, store, ref.folder, shard, self._pace)
        if damage:
            await asyncio.to_thread(require)
        async with self._leadership.write() as tx:
            await readings.note_shard(tx, ref, shard.rank, "corrupt" if damage else "ok")
        return [item.problem for item in damage]

    async def _conclude(self, ref: CheckpointRef, reading: Reading) -> None:
        async with self._leadership.write() as tx:
            if await readings.conclude(tx, ref.id, reading, actor="controller"):
                result = "corrupt" if reading.problems else "ok"
                log.info("scrub.read job=%s folder=%s result=%s", ref.job_id, ref.folder, result)

    def _pace(self, count: int) -> None:
        """Called between pieces, in the reading thread: wait until the pace allows the next one. Raises _Stopped."""
        now = time.monotonic()
        self._ready_at = max(self._ready_at, now) + count / self._settings.scrub_bytes_per_second
        if self._stopping.wait(max(0.0, self._ready_at - now)):
            raise _Stopped


def _of_rank(manifest: Manifest, rank: int) -> str:
    return f"{manifest.shards[rank].file} of {manifest.folder} was found damaged"
