"""What every request passes first: the size of its body counted while it is read, and headers that keep pages safe."""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, problem_of, problem_response

DRAINED_BYTES = 64 * 2**20  # of a refused body that are still read
REPORT_BYTES = 32 * 2**20  # a batch of 5000 records with log text
_CSP = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)


class BodyLimit:
    """Refuses bodies above a limit with 413, also without a Content-Length: bytes are counted as they come."""

    def __init__(self, app: ASGIApp, limit_bytes: Callable[[str], int]) -> None:
        self.app = app
        self.limit_bytes = limit_bytes  # of a path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = self.limit_bytes(scope["path"])
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > limit:
            if Headers(scope=scope).get("expect", "").lower() != "100-continue":
                await _drain(receive, 0)
            error = _too_large(limit)
            await problem_response(problem_of(error, scope["path"]), error.headers)(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:
                if message.get("more_body"):
                    await _drain(receive, seen)
                raise _too_large(limit)
            return message

        await self.app(scope, counted, send)


# Note: why a refused body is read to its end. Closing a connection whose other side still writes resets it, and the
# reset overtakes the answer: the client would see a broken connection instead of the 413.
async def _drain(receive: Receive, seen: int) -> None:
    """Read and forget the rest of a body, up to DRAINED_BYTES in all."""
    while seen < DRAINED_BYTES:
        message = await receive()
        seen += len(message.get("body", b""))
        if not message.get("more_body"):
            return


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is larger than {limit:,} bytes.", headers={"Connection": "close"})


class SafeHeaders:
    """No sniffing, no framing, no foreign scripts; answers of the API are never cached unless they say so."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
                headers["Content-Security-Policy"] = _CSP
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self.app(scope, receive, with_headers)
