"""The store as a whole: what nothing refers to, and jobs that only it knows."""

from __future__ import annotations

from fastapi import APIRouter

from server import orphans, recovery
from server.auth import Admin, Member
from server.routes.state import ERRORS, Db, TheSettings
from server.routes.stored import store_answers
from server.views import AdoptedView, OrphansView, StoreView
from workers.object_store import open_store

router = APIRouter(prefix="/v1/store", tags=["store"], responses=ERRORS)


@router.get("", operation_id="getStore")
async def get_store(who: Member, settings: TheSettings) -> StoreView:
    """Where checkpoints lie, for programs that read them without the server."""
    return StoreView(url=settings.store)


@router.get("/orphans", operation_id="listOrphans")
async def list_orphans(who: Admin, database: Db, settings: TheSettings) -> OrphansView:
    """Look through the whole store for what no row refers to, and for rows whose files are gone; nothing is removed."""
    with store_answers():
        survey = await orphans.survey(database, settings)
    found, jobs, more = survey.found, survey.jobs, survey.truncated
    return OrphansView(store=settings.store, at=database.now(), jobs=jobs, items=found, truncated=more)


@router.post("/adopt", operation_id="adoptJobs")
async def adopt(who: Admin, database: Db, settings: TheSettings) -> AdoptedView:
    """Write rows for jobs that are in the store and not in the database; each rests until it is resumed."""
    with store_answers():
        found = await recovery.recover(database, settings, open_store, database.write)
    return AdoptedView(jobs=found)
