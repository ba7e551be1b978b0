"""Dry runs: what a spec would cost at every stage, before anything starts."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from server.auth import Member, Viewer
from server.errors import not_found
from server.ids import is_id
from server.planning import predict
from server.routes import spec_body
from server.routes.state import ERRORS, Db, TheSettings
from server.rows import plans
from server.views import PendingPlan, PlanView

router = APIRouter(prefix="/v1/plans", tags=["plans"], responses=ERRORS)


@router.post(
    "",
    operation_id="createPlan",
    openapi_extra=spec_body.OPENAPI,
    responses={202: {"model": PendingPlan, "description": "A user's model is built in a process of its own first."}},
    response_model=PlanView,
)
async def create(
    request: Request, response: Response, who: Member, database: Db, settings: TheSettings
) -> PlanView | Response:
    """Plan a spec without submitting it."""
    spec = (await spec_body.read_spec(request, settings)).spec
    plan = await predict(spec, database, settings.data_dir)
    if plan is not None:
        return plan
    async with database.write() as tx:
        request_id = await plans.request(tx, who.name, spec.model_dump(mode="json"))
    pending = PendingPlan(id=request_id, status="pending", href=f"/v1/plans/{request_id}")
    headers = {"Location": pending.href}
    return Response(pending.model_dump_json(), 202, headers, media_type="application/json")


@router.get("/{plan_id}", operation_id="getPlan")
async def get(
    plan_id: Annotated[str, Path(description="id of a pending plan")], who: Viewer, database: Db
) -> PendingPlan:
    """A plan that was not ready at once."""
    async with database.read() as connection:
        found = await plans.pending(connection, plan_id) if is_id(plan_id) else None
    if found is None:
        raise not_found("plan", plan_id)
    return found
