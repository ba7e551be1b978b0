"""Dry runs: what a spec would cost at every stage, before anything starts."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from server.auth import Member, Viewer
from server.db import Database
from server.errors import not_found
from server.ids import is_id
from server.planning import predict, where_of
from server.routes import spec_body
from server.routes.state import ERRORS, Db, TheSettings
from server.rows import nodes, plans
from server.views import PendingPlan, PlanView
from workers.built_plan import COMMAND, question_of
from workers.planner import SpecPlan
from workers.spec import JobSpec

log = logging.getLogger("shardyard.api")
router = APIRouter(prefix="/v1/plans", tags=["plans"], responses=ERRORS)

BUILD_SECONDS = 120.0
_running: set[asyncio.Task[None]] = set()  # keeps the tasks from being collected


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
        request_id = await plans.request(tx, who.name, spec)
    task = asyncio.create_task(_build(database, request_id, spec, settings.data_dir))
    _running.add(task)
    task.add_done_callback(_running.discard)
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


async def _build(database: Database, request_id: str, spec: JobSpec, data_dir: FilePath) -> None:
    """Plan a user's model in a process of its own; their code never runs in this one."""
    async with database.read() as connection:
        where = where_of(spec, await nodes.views(connection), data_dir)
    code, out, complaint = await _run(COMMAND, question_of(spec, [spec.resources.ranks], where).encode())
    async with database.write() as tx:
        if code == 0:
            plan = SpecPlan.model_validate(json.loads(out)[0])
            await plans.finish(tx, request_id, result=plan.model_dump(mode="json"))
        else:
            log.info("plan.build_failed plan=%s code=%d", request_id, code)
            await plans.finish(tx, request_id, error=complaint[-4000:] or f"The process ended with code {code}.")


async def _run(command: Sequence[str], question: bytes) -> tuple[int, bytes, str]:
    """(exit code, stdout, stderr) of a command that is killed with its children after BUILD_SECONDS."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )
    try:
        out, complaint = await asyncio.wait_for(process.communicate(question), BUILD_SECONDS)
        return process.returncode or 0, out, complaint.decode(errors="replace").replace("\0", "")
    except TimeoutError:
        return -1, b"", f"The model was not built within {BUILD_SECONDS:.0f} s."
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
