"""For probes and Prometheus: alive, ready, numbers. Open to all who reach the port; no names in them."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from sqlalchemy.exc import SQLAlchemyError

from server.routes.state import Db, TheFeed
from server.rows import counts
from server.states import Status
from server.views import HealthView

router = APIRouter(tags=["health"])


@router.get("/healthz", operation_id="getHealth")
async def healthz() -> HealthView:
    """The process answers."""
    return HealthView(status="ok")


@router.get("/readyz", operation_id="getReadiness", responses={503: {"model": HealthView}})
async def readyz(response: Response, database: Db) -> HealthView:
    """The database answers, and says how long ago the controller held its lease."""
    try:
        async with database.read() as connection:
            leader = await counts.leader(connection, database.now())
    except SQLAlchemyError:
        response.status_code = 503
        return HealthView(status="unavailable", checks={"database": "does not answer"})
    return HealthView(status="ok", checks={"database": "ok", "controller": leader})


@router.get("/metrics", operation_id="getPrometheus", response_class=Response)
async def prometheus(database: Db, feed: TheFeed) -> Response:
    """Numbers of this moment in the Prometheus text format."""
    registry = CollectorRegistry()
    async with database.read() as connection:
        by_status = await counts.jobs_by_status(connection)
        numbers = await counts.numbers(connection)
    jobs = Gauge("shardyard_jobs", "Jobs by status.", ["status"], registry=registry)
    for status in Status:
        jobs.labels(status).set(by_status.get(status, 0))
    for name, (help_text, value) in numbers.items():
        Gauge(f"shardyard_{name}", help_text, registry=registry).set(value)
    Gauge("shardyard_feed_streams", "Open feed streams of this API.", registry=registry).set(feed.num_subscribers)
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
