"""What there is to see of a job: attempts, events, charts, memory, traffic, logs, checkpoints, plan, explanation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from server.auth import Viewer
from server.db import Database
from server.errors import invalid, not_found
from server.routes.state import ERRORS, Db, JobKey, TheSettings
from server.rows import (
    attempts,
    checkpoint_views,
    events,
    jobs,
    ledger,
    lineage,
    logs,
    memory,
    metrics,
    plans,
    queue,
    series,
)
from server.rows.checkpoint_views import CheckpointQuery
from server.rows.metrics import LAST_STEP, MetricsQuery
from server.views import (
    AttemptView,
    CheckpointPage,
    EventView,
    ExplainView,
    JobPlanView,
    LedgerView,
    LineageView,
    LogView,
    MemoryView,
    MetricsView,
    Page,
    SeriesNamesView,
)

T = TypeVar("T")

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["job data"], responses=ERRORS)

Step = Annotated[int, Query(ge=0, le=LAST_STEP)]
Width = Annotated[int, Query(ge=1, le=4000, description="points that the chart has room for")]
AttemptNumber = Annotated[int | None, Query(ge=1, le=2**31, description="number of an attempt; default: the newest")]
RankNumber = Annotated[int | None, Query(ge=0, le=2**31)]


async def _must_exist(database: Database, job_id: str) -> None:
    async with database.read() as connection:
        if await jobs.get(connection, job_id) is None:
            raise not_found("job", job_id)


def _existing(view: T | None, job_id: str) -> T:
    """The view of a job, None for one that is not there."""
    if view is None:
        raise not_found("job", job_id)
    return view


@router.get("/attempts", operation_id="listAttempts")
async def list_attempts(job_id: JobKey, who: Viewer, database: Db) -> Page[AttemptView]:
    """Every launch of the job, newest first."""
    await _must_exist(database, job_id)
    async with database.read() as connection:
        return Page[AttemptView](items=await attempts.views(connection, job_id, now=database.now()))


@router.get("/events", operation_id="listEvents")
async def list_events(
    job_id: JobKey,
    who: Viewer,
    database: Db,
    cursor: Annotated[str | None, Query(max_length=30, description="older than the page that gave it")] = None,
    after: Annotated[int | None, Query(ge=0, le=2**62, description="id of an event; later ones, oldest first")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> Page[EventView]:
    """What happened to the job, newest first."""
    if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise invalid("cursor", "is not a cursor of this list", value=cursor)
    await _must_exist(database, job_id)
    async with database.read() as connection:
        before = None if cursor is None else int(cursor)
        items, following = await events.page(connection, job_id, before=before, after=after, limit=limit)
    return Page[EventView](items=items, next_cursor=None if following is None else str(following))


@router.get(
    "/metrics",
    operation_id="getMetrics",
    responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
    response_model=MetricsView,
)
async def get_metrics(
    request: Request,
    job_id: JobKey,
    who: Viewer,
    database: Db,
    names: Annotated[str, Query(max_length=4000, description="series, by commas; none: loss (CSV: all)")] = "",
    width: Width = 800,
    from_step: Step = 0,
    to_step: Step = LAST_STEP,
    attempt: AttemptNumber = None,
    rank: RankNumber = None,
    format: Annotated[Literal["json", "csv"] | None, Query(description="default: by Accept")] = None,
) -> MetricsView | Response:
    """Charts, thinned to a width with the band that each point stands for; or every raw point as CSV.

    Without `attempt` a line has the newest attempt's value of each step, and what older attempts did beyond follows
    as branches.
    """
    chosen = tuple(dict.fromkeys(name for name in names.split(",") if name))
    await _must_exist(database, job_id)
    as_csv = format == "csv" or (format is None and request.headers.get("accept", "").startswith("text/csv"))
    if as_csv:
        query = MetricsQuery(chosen, width, from_step, to_step, attempt, rank)
        headers = {"Content-Disposition": f'attachment; filename="metrics-{job_id}.csv"'}
        return StreamingResponse(_csv(database, job_id, query), media_type="text/csv", headers=headers)
    query = MetricsQuery(chosen or ("loss",), width, from_step, to_step, attempt, rank)
    async with database.read() as connection:
        return await metrics.view(connection, job_id, query)


async def _csv(database: Database, job_id: str, query: MetricsQuery) -> AsyncIterator[str]:
    async with database.read() as connection:
        async for text in metrics.csv_rows(connection, job_id, query):
            yield text


@router.get("/metrics/names", operation_id="listSeries")
async def list_series(job_id: JobKey, who: Viewer, database: Db) -> SeriesNamesView:
    """Every series of the job in numbers."""
    await _must_exist(database, job_id)
    async with database.read() as connection:
        return SeriesNamesView(job_id=job_id, series=await series.stats(connection, job_id))


@router.get("/memory", operation_id="getMemory")
async def get_memory(
    job_id: JobKey,
    who: Viewer,
    database: Db,
    attempt: AttemptNumber = None,
    rank: RankNumber = None,
    from_step: Step = 0,
    to_step: Step = LAST_STEP,
    width: Width = 400,
) -> MemoryView:
    """Measured bytes by category, beside the plan and the paper's lines."""
    async with database.read() as connection:
        found = await memory.view(
            connection, job_id, attempt=attempt, rank=rank, first=from_step, last=to_step, width=width
        )
    return _existing(found, job_id)


@router.get("/ledger", operation_id="getLedger")
async def get_ledger(job_id: JobKey, who: Viewer, database: Db, attempt: AttemptNumber = None) -> LedgerView:
    """Measured traffic of the newest step, beside the plan."""
    async with database.read() as connection:
        found = await ledger.view(connection, job_id, attempt)
    return _existing(found, job_id)


@router.get("/logs", operation_id="getLogs")
async def get_logs(
    job_id: JobKey,
    who: Viewer,
    database: Db,
    attempt: AttemptNumber = None,
    rank: RankNumber = None,
    q: Annotated[str, Query(max_length=500, description="lines that contain this, whatever the case")] = "",
    before: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    after: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    limit: Annotated[int, Query(ge=0, le=5000)] = 500,
) -> LogView:
    """A window of the output of all ranks in time order; without a cursor its end."""
    if before is not None and after is not None:
        raise invalid("before", "cannot be combined with after")
    await _must_exist(database, job_id)
    async with database.read() as connection:
        return await logs.view(
            connection,
            job_id,
            attempt=attempt,
            rank=rank,
            search=q,
            before=before,
            after=after,
            limit=limit,
        )


@router.get("/logs/text", operation_id="downloadLogs", response_class=StreamingResponse)
async def download_logs(job_id: JobKey, who: Viewer, database: Db, rank: RankNumber = None) -> StreamingResponse:
    """The whole log as text, as much of it as is kept."""
    await _must_exist(database, job_id)
    headers = {"Content-Disposition": f'attachment; filename="log-{job_id}.txt"'}
    return StreamingResponse(_text(database, job_id, rank), media_type="text/plain; charset=utf-8", headers=headers)


async def _text(database: Database, job_id: str, rank: int | None) -> AsyncIterator[str]:
    last = 0
    while True:
        async with database.read() as connection:
            piece = await logs.text_after(connection, job_id, last, rank)
        if piece is None:
            return
        last, text = piece
        yield text


@router.get("/checkpoints", operation_id="listCheckpoints")
async def list_checkpoints(
    job_id: JobKey,
    who: Viewer,
    database: Db,
    shards: Annotated[bool, Query(description="each rank's file too")] = False,
    removed: Annotated[bool, Query(description="those that retention took, too")] = False,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=2000)] = None,
) -> CheckpointPage:
    """One page of the job's checkpoints, newest step first, with how many there are per status."""
    await _must_exist(database, job_id)
    async with database.read() as connection:
        return await checkpoint_views.page(connection, job_id, CheckpointQuery(shards, removed, cursor, limit))


@router.get("/lineage", operation_id="getLineage")
async def get_lineage(job_id: JobKey, who: Viewer, database: Db) -> LineageView:
    """What the job came from and what came of it: attempts, forks, clones and the checkpoints between them."""
    async with database.read() as connection:
        found = await lineage.view(connection, job_id)
    return _existing(found, job_id)


@router.get("/plan", operation_id="getJobPlan")
async def get_plan(job_id: JobKey, who: Viewer, database: Db, attempt: AttemptNumber = None) -> JobPlanView:
    """The plan made before the launch, or how far it is, and the engine's own of an attempt."""
    async with database.read() as connection:
        found = await plans.of_job(connection, job_id, attempt)
    return _existing(found, job_id)


@router.get("/explain", operation_id="explainJob")
async def explain(job_id: JobKey, who: Viewer, database: Db, settings: TheSettings) -> ExplainView:
    """Why the job is where it is, what would move it, and who is ahead."""
    async with database.read() as connection:
        found = await queue.explain(connection, job_id, settings.max_ranks)
    return _existing(found, job_id)
