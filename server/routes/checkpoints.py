"""Checkpoints: one with its shards, read every byte of it, its weights as one file."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.responses import StreamingResponse

from server.auth import Member, Viewer, check_owner
from server.errors import ApiError, not_found
from server.routes.state import ERRORS, CheckpointKey, Db, TheSettings
from server.rows import checkpoints, events, jobs
from server.views import CheckpointView, VerifyResult
from workers.object_store import open_store
from zero_engine import catalog
from zero_engine.export import Export
from zero_engine.manifest import CheckpointError
from zero_engine.store import StoreError

router = APIRouter(prefix="/v1/checkpoints/{checkpoint_id}", tags=["checkpoints"], responses=ERRORS)


async def _view(database: Db, checkpoint_id: str) -> CheckpointView:
    async with database.read() as connection:
        found = await checkpoints.views(connection, checkpoint_id=checkpoint_id)
    if not found:
        raise not_found("checkpoint", checkpoint_id)
    return found[0]


@router.get("", operation_id="getCheckpoint")
async def get(checkpoint_id: CheckpointKey, who: Viewer, database: Db) -> CheckpointView:
    """One checkpoint with its shards."""
    return await _view(database, checkpoint_id)


@router.post("/verify", operation_id="verifyCheckpoint")
async def verify(checkpoint_id: CheckpointKey, who: Member, database: Db, settings: TheSettings) -> VerifyResult:
    """Read every byte and compare it with its checksum; the checkpoint is marked by what was found."""
    view = await _view(database, checkpoint_id)
    async with database.read() as connection:
        job = await jobs.get(connection, view.job_id)
    check_owner(who, job.owner if job else "")
    if view.status == "deleted":
        raise ApiError(409, f"The checkpoint of step {view.step} was removed.", code="checkpoint_deleted")
    url = settings.job_store(view.job_id)
    try:
        found = await asyncio.to_thread(lambda: catalog.verify(open_store(url), view.folder))
    except StoreError as error:
        raise ApiError(503, f"The store does not answer: {error}", code="store_unavailable") from error
    bad = [s.rank for s in view.shards if any(s.file in problem for problem in found.problems)]
    said = f"{found.bytes_read:,} bytes are as they were written." if found.ok else "; ".join(found.problems)[:500]
    async with database.write() as tx:
        await checkpoints.set_status(
            tx,
            checkpoint_id,
            "verified" if found.ok else "corrupt",
            problem="; ".join(found.problems)[:2000] or None,
            bad_shards=dict.fromkeys(bad, "corrupt"),
        )
        await events.append(
            tx,
            view.job_id,
            "checkpoint.verified" if found.ok else "checkpoint.corrupt",
            f"Checkpoint of step {view.step}: {said}",
            actor=f"user:{who.name}",
            attempt=view.attempt,
            data={"step": view.step, "folder": view.folder},
        )
    return VerifyResult(checkpoint=await _view(database, checkpoint_id), ok=found.ok, problems=list(found.problems))


@router.get(
    "/export",
    operation_id="exportCheckpoint",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
)
async def export(
    checkpoint_id: CheckpointKey,
    who: Viewer,
    database: Db,
    settings: TheSettings,
    dtype: Annotated[Literal["fp32", "bf16", "fp16"] | None, Query(description="default: as stored")] = None,
) -> StreamingResponse:
    """The weights as one safetensors file with canonical names; every block is verified as it is read."""
    view = await _view(database, checkpoint_id)
    url = settings.job_store(view.job_id)

    def prepare() -> Export:
        store = open_store(url)
        return Export(store, catalog.read_manifest(store, view.folder), dtype)

    try:
        ready = await asyncio.to_thread(prepare)
    except CheckpointError as error:
        raise ApiError(409, f"The checkpoint cannot be exported: {error}", code="checkpoint_unreadable") from error
    except StoreError as error:
        raise ApiError(503, f"The store does not answer: {error}", code="store_unavailable") from error
    headers = {
        "Content-Length": str(ready.num_bytes),
        "Content-Disposition": f'attachment; filename="model-step-{view.step}.safetensors"',
    }
    return StreamingResponse(ready.pieces(), media_type="application/octet-stream", headers=headers)
