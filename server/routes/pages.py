"""The dashboard: files of `server/static`, compressed once, and index.html for every page that the browser opens."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.errors import ApiError

STATIC = Path(__file__).resolve().parent.parent / "static"
_TEXT = ("text/", "application/javascript", "application/json", "image/svg+xml")
_NOT_PAGES = ("/v1", "/healthz", "/readyz", "/metrics", "/openapi.json")
_MISSING = b"<!doctype html><title>Shardyard</title><p>The dashboard is not built here; run <code>make web</code>."


@dataclass(frozen=True)
class File:
    """A file ready to be sent."""

    body: bytes
    zipped: bytes | None  # where that is smaller
    media_type: str
    etag: str
    immutable: bool  # its name changes with its content


def load(folder: Path) -> dict[str, File]:
    """Every file below `folder` by its path from "/". Looking names up here cannot leave the folder."""
    found = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        if path.is_file():
            name = "/" + path.relative_to(folder).as_posix()
            found[name] = _file(name, path.read_bytes())
    return found


def _file(name: str, body: bytes) -> File:
    media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
    if name.endswith(".js"):
        media_type = "text/javascript"
    zipped = gzip.compress(body, 9, mtime=0) if media_type.startswith(_TEXT) else None
    if zipped is not None and len(zipped) >= len(body):
        zipped = None
    etag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
    return File(body, zipped, media_type, etag, immutable=name.startswith("/assets/"))


def router_of(folder: Path = STATIC) -> APIRouter:
    """Routes that serve `folder`, read once. They must come last: they answer every GET that nothing else did."""
    router = APIRouter(include_in_schema=False)
    files = load(folder)
    index = files.get("/index.html") or _file("/index.html", _MISSING)

    @router.api_route("/{path:path}", methods=["GET", "HEAD"])
    async def page(request: Request, path: str) -> Response:
        """A file of the dashboard, or its page."""
        name = f"/{path}"
        file = files.get(name)
        if file is None or name == "/index.html":
            if not _is_page(request, name):
                raise ApiError(404, f"There is nothing at {name[:200]}.")
            file = index
        return _send(request, file)

    return router


def _is_page(request: Request, name: str) -> bool:
    if name == "/":
        return True
    is_api = any(name == prefix or name.startswith(f"{prefix}/") for prefix in _NOT_PAGES)
    return not is_api and not name.startswith("/assets/") and "text/html" in request.headers.get("accept", "")


def _send(request: Request, file: File) -> Response:
    headers = {
        "ETag": file.etag,
        "Vary": "Accept-Encoding",
        "Cache-Control": "public, max-age=31536000, immutable" if file.immutable else "no-cache",
    }
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    body = file.body
    if file.zipped is not None and "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["Content-Encoding"] = file.zipped, "gzip"
    return Response(body, headers=headers, media_type=file.media_type)
