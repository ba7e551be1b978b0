"""Keeps checkpoint rows and checkpoint files the same: the index after lost reports, retention, deletion of jobs."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from server import recovery
from server.controller import checkpoint_files, spools
from server.controller.leader import Leadership
from server.controller.retention import ALWAYS_KEPT, Keeping, Kept, removable
from server.db import Database, Tx
from server.job_card import CARD_FILE
from server.models import Attempt, Checkpoint, Job, ReportSeq
from server.rows import checkpoints, events, jobs, needs, new_jobs, readings, stores
from server.settings import Settings
from server.states import Status
from server.whole_store import OpenStore, WholeStore, whole_store
from workers.contract import CheckpointRecord
from zero_engine.manifest import parse_folder
from zero_engine.store import Store, StoreError

log = logging.getLogger("shardyard.storekeeper")
AT_ONCE = 1000  # jobs whose retention is looked at with the same statements


@dataclass(frozen=True)
class Marked:
    """A checkpoint that retention has taken and whose files may still be there."""

    id: str
    job_id: str
    folder: str


class Storekeeper:
    """One job at a time; every method may be killed and called again."""

    def __init__(self, database: Database, settings: Settings, leadership: Leadership, open_store: OpenStore) -> None:
        self._database = database
        self._settings = settings
        self._leadership = leadership
        self._open_store = open_store
        self._stuck = set[str]()  # jobs whose removals fail, and whose events say so

    def _store(self, job_id: str) -> Store:
        return self._open_store(self._settings.job_store(job_id))

    async def index(self, job_id: str) -> None:
        """Write rows for checkpoints that exist in the store and that no report told of. Raises StoreError."""
        async with self._database.read() as connection:
            known = await _folders(connection, job_id)
        found = await asyncio.to_thread(checkpoint_files.unreported, self._store(job_id), known)
        if found:
            async with self._leadership.write() as tx:
                await _record_found(tx, job_id, found)

    async def settle(self) -> None:
        """Make sure that the store is the one it was; a new one gets its mark. Raises StoreError."""
        whole = await whole_store(self._database, self._settings, self._open_store)
        mark = await asyncio.to_thread(whole.settle)
        if whole.mark is None:
            async with self._leadership.write() as tx:
                await stores.note(tx, whole.top.url, mark)

    async def has(self, ref: checkpoints.CheckpointRef) -> bool:
        """Whether a checkpoint is in its store; one that is gone is marked. Raises StoreError if it cannot tell."""
        whole = await whole_store(self._database, self._settings, self._open_store)
        gone = await asyncio.to_thread(checkpoint_files.is_gone, self._store(ref.job_id), ref.folder, whole)
        if gone:
            async with self._leadership.write() as tx:
                await readings.mark_gone(tx, ref.id, actor="controller")
        return not gone

    async def describe(self, job_id: str) -> None:
        """Write the job's card into its store, so that a new database can know the job. Raises StoreError."""
        async with self._database.read() as connection:
            card = await new_jobs.card(connection, job_id)
        if card is not None:
            await asyncio.to_thread(self._store(job_id).put, CARD_FILE, card.encode())

    async def recover(self) -> None:
        """Fill a database that knows no job with what the store has. Raises StoreError."""
        if await recovery.is_new(self._database):
            write = self._leadership.write
            found = await recovery.recover(self._database, self._settings, self._open_store, write)
            if found:
                log.info("job.recovered jobs=%s", found)

    async def retain(self) -> None:
        """Apply the retention of every job that has more checkpoints than it keeps, and finish removals cut short."""
        async with self._database.read() as connection:
            crowded = await _crowded(connection)
            groups = [crowded[start : start + AT_ONCE] for start in range(0, len(crowded), AT_ONCE)]
            surplus = [ref.job_id for group in groups for ref in await _surplus(connection, group)]
        for job_id in dict.fromkeys(surplus):
            async with self._leadership.write() as tx:
                await self._mark(tx, job_id)
        async with self._database.read() as connection:
            marked = await _marked(connection)
        if marked:
            await self._remove(marked, await whole_store(self._database, self._settings, self._open_store))

    async def _remove(self, marked: Sequence[Marked], whole: WholeStore) -> None:
        """Of a job whose store does not let it, said once, the next look tries again."""
        failed = dict[str, str]()
        for each in marked:
            if each.job_id in failed:
                continue
            try:
                await asyncio.to_thread(checkpoint_files.remove, self._store(each.job_id), each.folder, whole)
            except StoreError as error:
                failed[each.job_id] = str(error)
                continue
            async with self._leadership.write() as tx:
                await checkpoints.set_status(tx, each.id, "deleted")
        for job_id, why in failed.items():
            if job_id not in self._stuck:
                await self._tell(job_id, "retention.stuck", f"Checkpoints cannot be removed: {why}")
        for job_id in self._stuck - failed.keys():
            await self._tell(job_id, "retention.resumed", "Checkpoints are removed again.")
        self._stuck = set(failed)

    async def _tell(self, job_id: str, action: str, message: str) -> None:
        log.warning("%s job=%s message=%s", action, job_id, message)
        async with self._leadership.write() as tx:
            if await jobs.get(tx.connection, job_id) is not None:
                await events.append(tx, job_id, action, message, actor="controller")

    async def _mark(self, tx: Tx, job_id: str) -> None:
        if await jobs.lock(tx, job_id) is None:
            return
        for ref in await _surplus(tx.connection, [job_id]):
            await checkpoints.set_status(tx, ref.id, "deleted", problem=checkpoints.REMOVING)
            log.info("checkpoint.removed job=%s folder=%s", job_id, ref.folder)

    async def tidy(self, job_id: str, running_fence: int) -> None:
        """Remove what saves of ended attempts left unfinished."""
        dead = await asyncio.to_thread(checkpoint_files.sweep, self._store(job_id), running_fence)
        if dead:
            log.info("checkpoint.swept job=%s folders=%s", job_id, dead)

    async def delete_job(self, job_id: str) -> None:
        """Remove a deleting job's files, then its rows; on failure the job says why and can be deleted again."""
        try:
            await asyncio.to_thread(self._remove_files, job_id, await self._attempt_ids(job_id))
        except Exception as error:  # any failure of the store is the job's reason
            log.exception("job.delete_failed job=%s", job_id)
            async with self._leadership.write() as tx:
                await jobs.transition(
                    tx,
                    job_id,
                    Status.DELETE_FAILED,
                    actor="controller",
                    reason="delete_failed",
                    data={"message": f"{type(error).__name__}: {error}"},
                )
            return
        async with self._leadership.write() as tx:
            if await jobs.remove(tx, job_id):
                await events.append(tx, None, "job.deleted", f"Job {job_id} was removed.", actor="controller")

    async def take_in_spools(self, attempt_id: str) -> None:
        """Apply what the ranks of a released attempt left unsent on this machine."""
        await spools.take_in(self._leadership, self._settings, attempt_id)

    async def drop_spools(self, attempt_id: str) -> None:
        """Remove an attempt's rank folders on this machine, when all that is in them was applied."""
        async with self._database.read() as connection:
            applied = await _all_closed(connection, attempt_id)
        folder = self._settings.ranks_dir / attempt_id
        if applied and folder.exists():
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _attempt_ids(self, job_id: str) -> list[str]:
        async with self._database.read() as connection:
            rows = await connection.execute(select(Attempt.id).where(Attempt.job_id == job_id))
            return [row.id for row in rows.all()]

    def _remove_files(self, job_id: str, attempt_ids: Sequence[str]) -> None:
        url = self._settings.job_store(job_id)
        checkpoint_files.remove_all(self._open_store(url))
        if "://" not in url and Path(url).exists():
            shutil.rmtree(url)
        for attempt_id in attempt_ids:
            folder = self._settings.ranks_dir / attempt_id
            if folder.exists():
                shutil.rmtree(folder)


async def _surplus(connection: AsyncConnection, job_ids: Sequence[str]) -> list[checkpoints.CheckpointRef]:
    """Checkpoints that their jobs' specs do not keep and that nobody needs."""
    existing = dict[str, list[checkpoints.CheckpointRef]]()
    for ref in await checkpoints.of_jobs(connection, job_ids):
        existing.setdefault(ref.job_id, []).append(ref)
    held = {need.checkpoint_id for need in await needs.of_jobs(connection, job_ids)}
    surplus = list[checkpoints.CheckpointRef]()
    for job_id, spec in (await jobs.specs(connection, job_ids)).items():
        keep, refs = spec["checkpoint"], existing.get(job_id, [])
        keeping = Keeping(keep["keep_latest"], keep["keep_best"], keep.get("keep_every", 0))
        gone = removable([_kept(ref) for ref in refs], keeping, held)
        surplus += [ref for ref in refs if ref.id in gone]
    return surplus


def _kept(ref: checkpoints.CheckpointRef) -> Kept:
    usable = ref.status in checkpoints.USABLE
    return Kept(
        ref.id, ref.step, ref.attempt, usable, ref.pinned, usable and ref.verified_at is not None, ref.eval_loss
    )


async def _record_found(tx: Tx, job_id: str, found: Sequence[CheckpointRecord]) -> None:
    """Write checkpoints that were found by listing, each with an event."""
    for record in found:
        place = parse_folder(record.folder)
        assert place is not None, record.folder
        if await checkpoints.record(tx, job_id, place[1], record) is not None:
            message = f"The checkpoint at step {record.step} was found in the store; no report told of it."
            await events.append(
                tx, job_id, "checkpoint.found", message, actor="controller", data={"folder": record.folder}
            )


async def _all_closed(connection: AsyncConnection, attempt_id: str) -> bool:
    ranks = (await connection.execute(select(Attempt.ranks).where(Attempt.id == attempt_id))).scalar_one_or_none()
    closed = select(func.count()).where(ReportSeq.attempt_id == attempt_id, ReportSeq.closed)
    return ranks is not None and (await connection.execute(closed)).scalar_one() == ranks


async def _folders(connection: AsyncConnection, job_id: str) -> frozenset[str]:
    rows = await connection.execute(select(Checkpoint.folder).where(Checkpoint.job_id == job_id))
    return frozenset(row.folder for row in rows.all())


async def _crowded(connection: AsyncConnection) -> list[str]:
    statement = (
        select(Checkpoint.job_id)
        .join(Job, Job.id == Checkpoint.job_id)
        .where(Checkpoint.status != "deleted", Job.status != Status.DELETING)
        .group_by(Checkpoint.job_id)
        .having(func.count() > ALWAYS_KEPT)
    )
    return [row.job_id for row in (await connection.execute(statement)).all()]


async def _marked(connection: AsyncConnection) -> list[Marked]:
    statement = select(Checkpoint.id, Checkpoint.job_id, Checkpoint.folder).where(
        Checkpoint.status == "deleted", Checkpoint.problem == checkpoints.REMOVING
    )
    return [Marked(*row) for row in (await connection.execute(statement)).all()]
