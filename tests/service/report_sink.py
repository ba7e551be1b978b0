"""A server for `POST /v1/reports` that applies each (attempt, rank, seq) once and can be scripted to misbehave."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from workers.contract import ReportBatch

Key = tuple[str, int]  # attempt, rank


class QuietServer(ThreadingHTTPServer):
    """Senders are killed in the middle of an answer: that is no news."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing."""


class ReportSink:
    """Collects reports as the real server would; every batch is checked against the contract."""

    def __init__(self) -> None:
        self.records: dict[Key, list[dict[str, Any]]] = defaultdict(list)  # applied, in order
        self.applied: dict[Key, int] = defaultdict(int)
        self.closed: set[Key] = set()
        self.tokens: set[str] = set()
        self.num_requests = 0
        self.trouble: Callable[[int], str | None] = lambda number: None  # "down", "drop", "forbid" by request number
        self._lock = threading.Lock()
        self._server = QuietServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1/reports"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def steps(self, attempt: str, rank: int) -> list[int]:
        """Step numbers of the points of a rank, in the order applied."""
        return [record["step"] for record in self.records[attempt, rank] if record["kind"] == "points"]

    def results(self, attempt: str, rank: int) -> list[dict[str, Any]]:
        """Result records of a rank."""
        return [record for record in self.records[attempt, rank] if record["kind"] == "result"]

    def output(self, attempt: str, rank: int) -> str:
        """Everything the rank printed."""
        return "\n".join(record["text"] for record in self.records[attempt, rank] if record["kind"] == "log")

    def apply(self, body: bytes, token: str) -> int:
        """Apply a batch once; the highest seq applied. Raises ValueError when it is not a ReportBatch."""
        batch = ReportBatch.model_validate_json(body)
        key = (str(batch.attempt_id), int(batch.rank))
        with self._lock:
            self.tokens.add(token)
            if batch.seq == self.applied[key] + 1:
                self.applied[key] = batch.seq
                self.records[key] += json.loads(body)["records"]
                if batch.closed:
                    self.closed.add(key)
            return self.applied[key]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        sink = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                with sink._lock:
                    sink.num_requests += 1
                    number = sink.num_requests
                body = self.rfile.read(int(self.headers["Content-Length"]))
                trouble = sink.trouble(number)
                if trouble == "down":
                    return self.answer(503, b"{}")
                if trouble == "forbid":
                    return self.answer(403, b"{}")
                try:
                    applied = sink.apply(body, self.headers["Authorization"].removeprefix("Bearer "))
                except ValueError as error:
                    return self.answer(422, json.dumps({"detail": str(error)}).encode())
                if trouble == "drop":  # applied, but the answer is lost
                    self.close_connection = True
                    return None
                return self.answer(200, json.dumps({"applied_seq": applied}).encode())

            def answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        return Handler
