"""An HTTP server of a few lines whose answers a test scripts; the real API is met in `tests/smoke`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Asked:
    """One request as it arrived."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Answer:
    """What to send back; bytes go out as they are, anything else as JSON."""

    body: Any
    status: int = 200
    content_type: str = "application/json"


@dataclass
class Script:
    """Answers by "METHOD /path", a function of what was asked or a fixed answer, and all requests so far."""

    answers: dict[str, Callable[[Asked], Answer] | Answer]
    asked: list[Asked] = field(default_factory=list)
    url: str = ""

    def answer(self, asked: Asked) -> Answer:
        """The scripted answer, 404 when there is none."""
        self.asked.append(asked)
        found = self.answers.get(f"{asked.method} {asked.path}")
        if found is None:
            return Answer({"status": 404, "detail": f"no {asked.path}", "code": "not_found"}, 404)
        return found(asked) if callable(found) else found


@contextmanager
def serving(script: Script) -> Iterator[Script]:
    """The script behind a port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(length)
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            body = json.loads(raw) if raw else None
            answer = script.answer(Asked(self.command, parts.path, query, dict(self.headers), body))
            data = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = _handle

        def log_message(self, *_: Any) -> None:
            """Tests read `asked` instead."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def job_view(**changes: Any) -> dict[str, Any]:
    """A job as the API shows it, with the fields that commands read."""
    return {
        "id": "01900000-0000-7000-8000-0000deadbeef",
        "name": "gpt",
        "tags": [],
        "status": "running",
        "reason": None,
        "created_at": "2026-01-01T00:00:00+00:00",
        "step": 3,
        "steps": 10,
        "loss": 2.5,
        "ranks": 2,
        "stage": 2,
        "attempt": 1,
        "eta_seconds": 12.0,
        "spec": {"data": {"kind": "text"}},
        "tokens_per_second": 1000.0,
        "phase": "training",
        "micro_batches": 4,
        "chunk": 2,
        "digest": None,
        "error": None,
        "allowed_actions": ["cancel", "kill", "pause"],
        **changes,
    }
