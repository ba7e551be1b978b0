"""One SSE stream per tab."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import StreamingResponse

from server.auth import Viewer
from server.errors import invalid
from server.ids import is_id
from server.routes.state import ERRORS, TheFeed
from server.views import FeedChange

router = APIRouter(prefix="/v1", tags=["feed"], responses=ERRORS)


@router.get(
    "/feed",
    operation_id="getFeed",
    response_class=StreamingResponse,
    responses={
        200: {
            "model": FeedChange,
            "description": "`event: change` with a FeedChange; `event: reset` when what was missed is no longer kept.",
            "content": {
                "text/event-stream": {
                    "example": 'id: 42\nevent: change\ndata: {"topic": "metrics", "job_id": null}\n\n',
                }
            },
        }
    },
)
async def stream(
    who: Viewer,
    feed: TheFeed,
    job: Annotated[str | None, Query(description="only what concerns this job")] = None,
    last_event_id: Annotated[
        str | None, Header(description="id of the last message seen; what followed is sent")
    ] = None,
) -> StreamingResponse:
    """What changes, as it changes. A browser's EventSource comes back with Last-Event-ID by itself."""
    if job is not None and not is_id(job):
        raise invalid("job", "is not a job id", value=job)
    if last_event_id is not None and not (last_event_id.isascii() and last_event_id.isdigit()):
        raise invalid("Last-Event-ID", "is not an id of this feed", value=last_event_id)
    last_id = None if last_event_id is None else int(last_event_id[:18])
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(feed.stream(job, last_id), media_type="text/event-stream", headers=headers)
