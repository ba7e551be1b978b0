"""Checkpoints: one with its shards, read every byte of it, its weights as one file."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import StreamingResponse

from server.auth import Member, Viewer, check_owner
from server.controller import checkpoint_files
from server.errors import ApiError, not_found
from server.exporting import Archive, Dtype, Format, archive
from server.routes.state import ERRORS, CheckpointKey, Db, TheSettings
from server.routes.stored import store_answers
from server.rows import checkpoint_views, jobs, readings
from server.rows.readings import Reading
from server.views import CheckpointView, VerifyResult
from server.whole_store import WholeStore, whole_store
from workers.object_store import open_store
from zero_engine.export import Export

router = APIRouter(prefix="/v1/checkpoints/{checkpoint_id}", tags=["checkpoints"], responses=ERRORS)

BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}


async def _view(database: Db, checkpoint_id: str) -> CheckpointView:
    async with database.read() as connection:
        found = await checkpoint_views.one(connection, checkpoint_id)
    if found is None:
        raise not_found("checkpoint", checkpoint_id)
    return found


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
    with store_answers():
        whole = await whole_store(database, settings, open_store)
        found = await asyncio.to_thread(lambda: checkpoint_files.verify(open_store(url), view.folder, whole))
    said = Reading(found.problems, frozenset(found.bad_ranks), found.bytes_read)
    async with database.write() as tx:
        await readings.conclude(tx, checkpoint_id, said, actor=f"user:{who.name}")
    return VerifyResult(checkpoint=await _view(database, checkpoint_id), ok=found.ok, problems=list(found.problems))


@router.get(
    "/export",
    operation_id="exportCheckpoint",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": BINARY, "application/x-tar": BINARY}}},
)
async def export(
    checkpoint_id: CheckpointKey,
    who: Viewer,
    database: Db,
    settings: TheSettings,
    dtype: Annotated[Dtype | None, Query(description="of the weights; default: as stored")] = None,
    format: Annotated[
        Format,
        Query(
            description="safetensors: one file; folder: a tar with config.json and the tokenizer too; transformers: a "
            "tar of the folder that the library of that name loads (model gpt)"
        ),
    ] = "safetensors",
) -> StreamingResponse:
    """The weights with canonical names, tied ones once, alone or with what reads them; every block is verified."""
    view = await _view(database, checkpoint_id)
    async with database.read() as connection:
        job = await jobs.get(connection, view.job_id)
    if job is None:
        raise not_found("checkpoint", checkpoint_id)
    url, spec = settings.job_store(view.job_id), job.job_spec()

    def prepare(whole: WholeStore) -> Export | Archive:
        store = open_store(url)
        manifest = checkpoint_files.read_manifest(store, view.folder, whole)
        if format == "safetensors":
            return Export(store, manifest, dtype)
        return archive(store, manifest, spec, format, dtype)

    with store_answers():
        ready = await asyncio.to_thread(prepare, await whole_store(database, settings, open_store))
    kind, ending = ("octet-stream", "safetensors") if format == "safetensors" else ("x-tar", "tar")
    headers = {
        "Content-Length": str(ready.num_bytes),
        "Content-Disposition": f'attachment; filename="model-step-{view.step}.{ending}"',
    }
    return StreamingResponse(ready.pieces(), media_type=f"application/{kind}", headers=headers)
