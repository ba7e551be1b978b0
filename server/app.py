"""The API as one ASGI app. `create_app(settings, database)`; importing this loads neither torch nor ray.

From the outside in: safe headers, compression, the size of bodies, Host and Origin, then the routes. The database is
opened and closed by who calls; the feed runs in the app's lifespan.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware

from server import errors
from server.auth import Gate, OriginCheck
from server.db import Database
from server.examples import EXAMPLES
from server.feed import Feed
from server.limits import REPORT_BYTES, BodyLimit, SafeHeaders
from server.routes import (
    actions,
    checkpoints,
    cluster,
    feed,
    forks,
    health,
    job_data,
    jobs,
    pages,
    plans,
    reports,
    session,
    store,
)
from server.settings import Settings
from server.texts import refuse_unstorable_text
from workers.contract import ReportBatch
from workers.spec import JobSpec

TITLE = "Shardyard"
VERSION = "1"
BODY_MODELS = (JobSpec, ReportBatch)  # read by hand, so FastAPI does not know them


def create_app(
    settings: Settings,
    database: Database,
    wake: Callable[[], None] = lambda: None,
    *,
    static: Path = pages.STATIC,
) -> FastAPI:
    """The API over an open database. `wake` is called after each commit that the controller should look at."""
    app = FastAPI(
        title=TITLE, version=VERSION, lifespan=_lifespan, docs_url=None, redoc_url=None, openapi_url="/openapi.json",
        dependencies=[Depends(refuse_unstorable_text)],
    )  # fmt: skip
    app.state.settings = settings
    app.state.database = database
    app.state.feed = Feed(database)
    app.state.gate = Gate(database, settings)
    database.on_change = app.state.feed.wake
    database.on_work = wake
    errors.install(app)
    for module in (jobs, actions, forks, job_data, checkpoints, plans, cluster, feed, reports, session, store, health):
        app.include_router(module.router)
    app.include_router(pages.router_of(static))
    app.add_middleware(OriginCheck, gate=app.state.gate)
    app.add_middleware(
        BodyLimit, limit_bytes=lambda path: REPORT_BYTES if path == "/v1/reports" else settings.max_body_bytes
    )
    app.add_middleware(
        GZipMiddleware,
        minimum_size=1000,
        compresslevel=4,
        exclude_content_types=(*DEFAULT_EXCLUDED_CONTENT_TYPES, "application/octet-stream", "application/x-tar"),
    )
    app.add_middleware(SafeHeaders)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    running: Feed = app.state.feed
    await running.start()
    try:
        yield
    finally:
        await running.close()


def _openapi(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1 with the bodies that are read by hand, the ways to authenticate, and who needs which."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(
        title=TITLE,
        version=VERSION,
        summary="Trains PyTorch models that do not fit one GPU, as a service.",
        routes=app.routes,
    )
    schemas = document["components"]["schemas"]
    for model in BODY_MODELS:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    for name, example in EXAMPLES.items():
        schemas[name]["examples"] = [example]
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["summary"] = _words(operation["operationId"])
    document["components"]["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer"},
        "session": {"type": "apiKey", "in": "cookie", "name": "shardyard_session"},
        "attemptToken": {"type": "http", "scheme": "bearer", "description": "of one attempt; ranks only"},
    }
    document["security"] = [{"token": []}, {"session": []}]
    app.openapi_schema = document
    return document


def _words(operation_id: str) -> str:
    """`listJobs` as "List jobs"."""
    return re.sub("([A-Z])", lambda found: " " + found[1].lower(), operation_id).capitalize()
