"""The store as a whole: what nothing refers to, and jobs that only it knows."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from server import orphans, recovery
from server.auth import Admin
from server.errors import ApiError
from server.routes.state import ERRORS, Db, TheSettings
from server.rows import checkpoints
from server.views import AdoptedView, OrphansView
from workers.object_store import open_store
from zero_engine.store import StoreError

router = APIRouter(prefix="/v1/store", tags=["store"], responses=ERRORS)


@router.get("/orphans", operation_id="listOrphans")
async def list_orphans(who: Admin, database: Db, settings: TheSettings) -> OrphansView:
    """Look through the whole store for what no row refers to, and for rows whose files are gone; nothing is removed."""
    async with database.read() as connection:
        known = await checkpoints.known_folders(connection)
    try:
        items, jobs, more = await asyncio.to_thread(orphans.survey, settings.store, known)
    except StoreError as error:
        raise ApiError(503, f"The store does not answer: {error}", code="store_unavailable") from error
    return OrphansView(store=settings.store, at=database.now(), jobs=jobs, items=items, truncated=more)


@router.post("/adopt", operation_id="adoptJobs")
async def adopt(who: Admin, database: Db, settings: TheSettings) -> AdoptedView:
    """Write rows for jobs that are in the store and not in the database; each rests until it is resumed."""
    try:
        found = await recovery.recover(database, settings, open_store, database.write)
    except StoreError as error:
        raise ApiError(503, f"The store does not answer: {error}", code="store_unavailable") from error
    return AdoptedView(jobs=found)
