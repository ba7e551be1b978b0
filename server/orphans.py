"""What lies in the store that nothing refers to. Reported, never removed from here; nothing here loads torch.

A save or deletion that was cut short is swept by the controller when an attempt of the job is released; a folder of a
job that the database does not know may belong to another service on the same store: only a person decides about it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from server.db import Database
from server.job_card import CARD_FILE
from server.rows import checkpoints
from server.rows.checkpoints import KnownJob
from server.settings import Settings
from server.views import OrphanView
from server.whole_store import MARK_FILE, OpenStore, WholeStore, whole_store
from workers.object_store import open_store
from zero_engine.catalog import TOMBSTONE
from zero_engine.manifest import parse_folder
from zero_engine.shard import MANIFEST
from zero_engine.store import NotFound, Store, StoreAway

MOST = 500  # orphans that are listed
Kind = Literal["job", "save", "deletion", "checkpoint", "file", "missing"]

_MEANINGS: dict[Kind, str] = {
    "job": "The database has no such job: another service's, or a lost database's. Adopt it, or remove it by hand.",
    "save": "A save that was never finished; the next release of an attempt of the job removes it.",
    "deletion": "A removal that was cut short; the controller finishes it at its next start or release.",
    "checkpoint": "A published checkpoint without a row; it gets one with the next launch of the job.",
    "file": "No part of any checkpoint; nobody reads it, and nobody removes it.",
    "missing": "The database has this checkpoint and its files are gone.",
}


@dataclass(frozen=True)
class Survey:
    """What a look through the whole store found."""

    found: list[OrphanView]
    jobs: int  # folders of jobs that were looked through
    truncated: bool  # there is more than is listed


async def survey(database: Database, settings: Settings, open_top: OpenStore = open_store) -> Survey:
    """Look through the store. Rows and files are read one after the other, while jobs save and retention removes: what
    is on its way between them is no orphan. So only what a second look finds too is told.

    Raises StoreError, also for a store that is empty while checkpoints are known: a disk that is not mounted.
    """
    whole = await whole_store(database, settings, open_top)

    async def look() -> Survey:
        async with database.read() as connection:
            known = await checkpoints.known_folders(connection)
        return await asyncio.to_thread(_survey, whole, settings.store, known)

    before = await look()
    if not before.found:
        return before
    places, after = {_place(each) for each in before.found}, await look()
    return replace(after, found=[each for each in after.found if _place(each) in places])


def _place(orphan: OrphanView) -> tuple[str, str, str]:
    return orphan.kind, orphan.job_id, orphan.place


def _survey(whole: WholeStore, store_url: str, known: Mapping[str, KnownJob]) -> Survey:
    top = whole.top
    folders = set(top.folders())
    if not folders and any(_expected(job) for job in known.values()) and not whole.is_there():
        raise StoreAway(f"there is nothing in {store_url}; is it mounted?")
    jobs = sorted({*folders, *known})
    found = list(islice(_everywhere(top, store_url, jobs, known), MOST + 1))
    return Survey(found[:MOST], len(jobs), len(found) > MOST)


def _everywhere(top: Store, store_url: str, jobs: Sequence[str], known: Mapping[str, KnownJob]) -> Iterator[OrphanView]:
    for key in sorted(set(top.loose()) - {MARK_FILE}):
        yield _orphan(top, "", "file", key, [key])
    for job_id in jobs:
        yield from _of_job(open_store(f"{store_url.rstrip('/')}/{job_id}"), job_id, known.get(job_id))


def _of_job(store: Store, job_id: str, job: KnownJob | None) -> Iterator[OrphanView]:
    keys = list(store.list())
    if job is None:
        yield _orphan(store, job_id, "job", "", keys)
        return
    by_folder: dict[str, list[str]] = {folder: [] for folder in store.folders()}
    for key in keys:
        folder, slash, _ = key.partition("/")
        if slash and parse_folder(folder) is not None:
            by_folder.setdefault(folder, []).append(key)
        elif key != CARD_FILE:
            yield _orphan(store, job_id, "file", key, [key])
    published = set()
    for folder, inside in sorted(by_folder.items()):
        kind = _kind_of(folder, inside, job)
        if kind is None:
            published.add(folder)
        elif kind != "file":
            yield _orphan(store, job_id, kind, folder, inside)
    for folder in sorted(_expected(job) - published - by_folder.keys()):
        yield _orphan(store, job_id, "missing", folder, [])


def _expected(job: KnownJob) -> set[str]:
    """Folders of checkpoints that should be there."""
    return {folder for folder, status in job.folders.items() if status != "deleted"}


def _kind_of(folder: str, keys: Collection[str], job: KnownJob) -> Kind | None:
    """What a folder is, None when all is as it should be."""
    place = parse_folder(folder)
    if place is None:
        return "file"
    if folder in job.removing:
        return None
    names = {key.rsplit("/", 1)[1] for key in keys}
    if TOMBSTONE in names or (job.folders.get(folder) == "deleted"):
        return "deletion"
    if MANIFEST in names:
        return None if folder in job.folders else "checkpoint"
    if folder in job.folders:
        return "missing"
    return None if place[1] == job.running_fence else "save"


def _orphan(store: Store, job_id: str, kind: Kind, place: str, keys: Collection[str]) -> OrphanView:
    sizes = sum(_size(store, key) for key in keys)
    readable = place.encode(errors="backslashreplace").decode()  # a file name may be no text
    return OrphanView(kind=kind, job_id=job_id, place=readable, bytes=sizes, meaning=_MEANINGS[kind])


def _size(store: Store, key: str) -> int:
    try:
        return store.size(key)
    except NotFound:
        return 0  # removed since it was listed
