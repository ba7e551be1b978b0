"""A thin client of the REST API over httpx: JSON in, JSON out, every problem an exception.

The answers are the models of `server/views/`, kept as plain JSON here so that a command line of another version than
the server's goes on working.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from ssl import PROTOCOL_TLS_CLIENT, SSLContext
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from server.cli.errors import BadInput, ServerProblem, ServerUnreachable

Json = dict[str, Any]

REQUEST_SECONDS = 60.0
RETRY_SECONDS = 0.5  # between tries to reach a server that went away
LOST_ANSWERS = 2  # after so many a submission is given up at the next
GONE_SECONDS = 120.0  # how long a follower waits for a server that went away


@dataclass(frozen=True)
class Address:
    """Where the server is and how to be let in."""

    url: str
    token: str
    hint: str  # what to say when nobody answers there


def find_server(server: str | None, token: str | None, data_dir: Path) -> Address:
    """The address named, or the one that `shardyard serve` left in its data folder.

    The token of the data folder is shown to servers of this machine only. Raises ServerUnreachable, BadInput.
    """
    if server:
        if not server.startswith(("http://", "https://")):
            raise BadInput(f"--server {server!r} is not a URL; write http://HOST:PORT")
        local = urlsplit(server).hostname in ("127.0.0.1", "localhost", "::1")
        token = token or (_read(data_dir / "token") if local else "")
        return Address(server.rstrip("/"), token, "is it running, and is the address right?")
    token = token or _read(data_dir / "token")
    port = _read(data_dir / "port")
    if not port:
        raise ServerUnreachable(
            f"No server runs on {data_dir}: start one with `shardyard serve`, or name one with --server URL."
        )
    return Address(f"http://127.0.0.1:{port}", token, f"`shardyard serve` starts it again on {data_dir}.")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except PermissionError as error:
        raise BadInput(f"{path} may not be read by this user; give the token with --token.") from error


class Client:
    """Calls of one command. Use as a context manager."""

    def __init__(self, address: Address, transport: httpx.BaseTransport | None = None) -> None:
        self.address = address
        headers = {"Authorization": f"Bearer {address.token}"} if address.token else {}
        self._http = httpx.Client(
            base_url=address.url,
            headers=headers,
            timeout=REQUEST_SECONDS,
            transport=transport or _transport(address.url),
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection."""
        self._http.close()

    def get(self, path: str, **query: Any) -> Any:
        """The JSON of GET; query values of None are left out. Raises ServerProblem, ServerUnreachable."""
        return self._json("GET", path, params=_present(query))

    def post(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON of POST, None for an empty answer. Raises ServerProblem, ServerUnreachable."""
        return self._json("POST", path, json={} if body is None else body, headers=dict(headers or {}))

    def delete(self, path: str) -> Any:
        """The JSON of DELETE. Raises ServerProblem, ServerUnreachable."""
        return self._json("DELETE", path)

    def post_once(self, path: str, body: Any, key: str) -> Any:
        """POST under an idempotency key: sent again when the answer was lost, done once in any case."""
        for _ in range(LOST_ANSWERS):
            try:
                return self.post(path, body, {"Idempotency-Key": key})
            except ServerUnreachable:
                time.sleep(RETRY_SECONDS)
        return self.post(path, body, {"Idempotency-Key": key})

    def items(self, path: str, limit: int, **query: Any) -> list[Json]:
        """Up to `limit` items of a paged list, as many pages as it takes."""
        return [item for page in self.pages(path, limit, **query) for item in page["items"]]

    def pages(self, path: str, limit: int, **query: Any) -> Iterator[Json]:
        """The pages of a list, until they hold `limit` items or there are no more."""
        cursor: str | None = None
        while limit > 0:
            page = self.get(path, limit=min(limit, 200), cursor=cursor, **query)
            yield page
            limit -= len(page["items"])
            cursor = page.get("next_cursor")
            if cursor is None:
                return

    @contextmanager
    def bytes_of(self, path: str, **query: Any) -> Iterator[tuple[int | None, Iterator[bytes]]]:
        """A download: its length if known, and its pieces. Raises ServerProblem, ServerUnreachable."""
        try:
            with self._http.stream("GET", path, params=_present(query)) as answer:
                if answer.status_code >= 400:
                    answer.read()
                    raise _problem(answer)
                length = answer.headers.get("content-length")
                yield (int(length) if length else None), answer.iter_bytes()
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def changes(self, job_id: str, at_least_every_seconds: float = 5.0) -> Iterator[None]:
        """Yields now and whenever something about the job may have changed, for ever.

        Listens to the feed and comes back after `at_least_every_seconds` in any case. A server that went away is
        waited for, GONE_SECONDS at most; then ServerUnreachable.
        """
        yield
        silent_since = time.monotonic()
        last_id = ""
        while True:
            try:
                for event_id in self._feed(job_id, last_id, at_least_every_seconds):
                    silent_since = time.monotonic()
                    last_id = event_id or last_id
                    yield
            except httpx.ReadTimeout:
                silent_since = time.monotonic()
                yield
            except httpx.TransportError as error:
                if time.monotonic() - silent_since > GONE_SECONDS:
                    raise self._unreachable(error) from error
                time.sleep(RETRY_SECONDS)

    def _feed(self, job_id: str, last_id: str, read_seconds: float) -> Iterator[str]:
        timeout = httpx.Timeout(REQUEST_SECONDS, read=read_seconds)
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_id} if last_id else {})
        with self._http.stream("GET", "/v1/feed", params={"job": job_id}, headers=headers, timeout=timeout) as answer:
            if answer.status_code >= 400:
                answer.read()
                raise _problem(answer)
            event_id, seen = last_id, False
            for line in answer.iter_lines():
                if line.startswith("id:"):
                    event_id = line[3:].strip()
                seen = seen or line.startswith("data:")
                if not line and seen:
                    seen = False
                    yield event_id
        raise httpx.RemoteProtocolError("the feed ended")

    def _json(self, method: str, path: str, **request: Any) -> Any:
        try:
            answer = self._http.request(method, path, **request)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if answer.status_code >= 400:
            raise _problem(answer)
        return answer.json() if answer.content else None

    def _unreachable(self, error: httpx.TransportError) -> ServerUnreachable:
        what = str(error) or type(error).__name__
        return ServerUnreachable(f"No answer from {self.address.url} ({what}): {self.address.hint}")


def _transport(url: str) -> httpx.BaseTransport:
    """Reading the certificates of the world takes 20 to 50 ms: not for a server that is spoken to in the clear.

    Then nobody's certificate is trusted.
    """
    trusted = True if url.startswith("https://") else SSLContext(PROTOCOL_TLS_CLIENT)
    return httpx.HTTPTransport(verify=trusted, retries=2)


def _present(query: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in query.items() if value is not None}


def _problem(answer: httpx.Response) -> ServerProblem:
    try:
        body = answer.json()
    except json.JSONDecodeError:
        body = {}
    if not isinstance(body, dict):
        body = {}
    if answer.status_code == 401:
        body = {
            **body,
            "detail": "The server does not know this token: give one with --token, or see `shardyard token`.",
        }
    return ServerProblem(answer.status_code, body)
