"""Jobs and checkpoints from the store alone: what a new database is filled with.

Every published checkpoint of a job that has a card gets its row again; the job rests, `cancelled`, until a person
resumes it. Called once when the database is empty, and on request for jobs that it does not know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from server.controller import checkpoint_files
from server.db import Database, Tx
from server.ids import is_id
from server.job_card import CARD_FILE, CardError, JobCard
from server.rows import checkpoints, events, jobs, new_jobs
from server.settings import Settings
from server.whole_store import OpenStore
from workers.contract import CheckpointRecord
from workers.spec import JobSpec
from zero_engine import catalog
from zero_engine.manifest import parse_folder
from zero_engine.store import NotFound, Store

log = logging.getLogger("shardyard.recovery")
Write = Callable[[], AbstractAsyncContextManager[Tx]]


@dataclass(frozen=True)
class Found:
    """A job that is in the store and not in the database."""

    card: JobCard
    spec: JobSpec
    last_fence: int  # number of its last attempt that left something
    checkpoints: tuple[CheckpointRecord, ...]

    @property
    def step(self) -> int:
        """Of the newest checkpoint; without any of the one it was forked from, or 0."""
        return self.checkpoints[-1].step if self.checkpoints else self.card.fork_step or 0


async def recover(database: Database, settings: Settings, open_store: OpenStore, write: Write) -> list[str]:
    """Write rows for every job of the store that the database does not know; their ids. Raises StoreError."""
    folders = await asyncio.to_thread(lambda: sorted(filter(is_id, open_store(settings.store).folders())))
    async with database.read() as connection:
        unknown = set(folders) - await jobs.existing(connection, folders)
    seen = [await asyncio.to_thread(look, open_store(settings.job_store(job_id)), job_id) for job_id in sorted(unknown)]
    recovered = []
    for found in origins_first([each for each in seen if each is not None]):
        async with write() as tx:
            if await _write(tx, found):
                recovered.append(found.card.id)
    return recovered


def origins_first(found: Sequence[Found]) -> list[Found]:
    """Every fork behind the job that it was forked from, whose checkpoints have rows by then."""
    by_id, ordered = {each.card.id: each for each in found}, dict[str, Found]()
    for each in found:
        line = [each]
        while (origin := line[-1].card.origin) and origin.job in by_id and by_id[origin.job] not in line:
            line.append(by_id[origin.job])
        ordered |= {one.card.id: one for one in reversed(line) if one.card.id not in ordered}
    return list(ordered.values())


def look(store: Store, job_id: str) -> Found | None:
    """What the store says of a job; None without a usable card."""
    try:
        card = JobCard.decode(store.get(CARD_FILE), job_id)
        spec = card.job_spec()
    except NotFound:
        return None
    except CardError as error:
        log.warning("recovery.card_unusable job=%s error=%s", job_id, error)
        return None
    found = checkpoint_files.unreported(store, ())
    return Found(card, spec, catalog.next_fence(store) - 1, tuple(found))


async def _write(tx: Tx, found: Found) -> bool:
    card = found.card
    fork = None if card.forked_from is None else await _fork(tx, card, card.forked_from)
    new = new_jobs.NewJob(card.id, card.owner, found.spec, card.spec_yaml, None, None, card.cloned_from, fork)
    if not await new_jobs.recreate(tx, new, card.chunk, card.created_at, found.last_fence, found.step):
        return False
    for record in found.checkpoints:
        place = parse_folder(record.folder)
        assert place is not None, record.folder
        await checkpoints.record(tx, card.id, place[1], record)
    message = f"Found in the store with {len(found.checkpoints)} checkpoints; the database did not know the job."
    await events.append(tx, card.id, "job.recovered", message, actor="controller", data={"step": found.step})
    return True


async def _fork(tx: Tx, card: JobCard, forked_from: str) -> new_jobs.Fork:
    """Where it begins: its origin's checkpoint has another id in this database than in the one before."""
    origin = card.origin and await checkpoints.in_folder(tx.connection, card.origin.job, card.origin.folder)
    return new_jobs.Fork(origin.id if origin else forked_from, card.fork_step or 0)


async def is_new(database: Database) -> bool:
    """Whether the database knows no job at all."""
    async with database.read() as connection:
        return not await jobs.any_exists(connection)
