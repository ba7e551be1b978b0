"""The queue and the nodes, from the tables that the controller refreshes."""

from __future__ import annotations

from fastapi import APIRouter

from server.auth import Viewer
from server.routes.state import ERRORS, Db
from server.rows import nodes, queue
from server.views import NodesView, QueueView

router = APIRouter(prefix="/v1", tags=["cluster"], responses=ERRORS)


@router.get("/nodes", operation_id="listNodes")
async def list_nodes(who: Viewer, database: Db) -> NodesView:
    """Every node with its slots and who holds them."""
    async with database.read() as connection:
        return NodesView(items=await nodes.views(connection))


@router.get("/queue", operation_id="getQueue")
async def get_queue(who: Viewer, database: Db) -> QueueView:
    """The jobs that wait, in the order of start, each with the reason."""
    async with database.read() as connection:
        return await queue.view(connection)
