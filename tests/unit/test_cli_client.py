"""The command line's client: where it finds the server, what it makes of an answer, and how it follows a job."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from server.cli.client import Address, Client, find_server
from server.cli.connection import Session
from server.cli.errors import BadInput, ServerProblem, ServerUnreachable
from server.cli.follow import wait_for
from server.cli.output import Output
from tests.unit.scripted_server import Answer, Asked, Script, serving


def client_of(script: Script) -> Client:
    return Client(Address(script.url, "secret", "start it"))


def test_the_server_of_a_data_folder_is_found_by_the_port_and_token_it_left(tmp_path: Path) -> None:
    """Nobody has to type an address or a token on the machine that serves."""
    (tmp_path / "port").write_text("8471\n")
    (tmp_path / "token").write_text("abc\n")
    address = find_server(None, None, tmp_path)
    assert (address.url, address.token) == ("http://127.0.0.1:8471", "abc")


def test_without_a_server_the_error_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(ServerUnreachable, match="shardyard serve"):
        find_server(None, None, tmp_path)


@pytest.mark.parametrize(("url", "token"), [("http://127.0.0.1:9", "abc"), ("http://elsewhere.example:9", "")])
def test_the_local_token_is_never_shown_to_a_server_elsewhere(tmp_path: Path, url: str, token: str) -> None:
    """An address typed by mistake must not collect the admin token of this machine."""
    (tmp_path / "token").write_text("abc")
    assert find_server(url, None, tmp_path).token == token
    assert find_server(url, "given", tmp_path).token == "given"


def test_an_address_that_is_no_url_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="http://HOST:PORT"):
        find_server("localhost:8470", None, tmp_path)


def test_every_request_carries_the_token_and_leaves_out_queries_that_were_not_given() -> None:
    with serving(Script({"GET /v1/jobs": Answer({"items": []})})) as script, client_of(script) as client:
        client.get("/v1/jobs", status=None, limit=5)
    (asked,) = script.asked
    assert asked.headers["Authorization"] == "Bearer secret" and asked.query == {"limit": "5"}


def test_pages_are_fetched_until_the_limit_or_the_end() -> None:
    """Keyset pages: the cursor of one answer is the question of the next."""

    def page(asked: Asked) -> Answer:
        start = int(asked.query.get("cursor", "0"))
        items = [{"n": n} for n in range(start, start + int(asked.query["limit"]))]
        return Answer({"items": items, "next_cursor": str(start + len(items)) if start < 400 else None})

    with serving(Script({"GET /v1/jobs": page})) as script, client_of(script) as client:
        assert [item["n"] for item in client.items("/v1/jobs", 450)] == list(range(450))
        assert len(script.asked) == 3


@pytest.mark.parametrize(
    ("status", "exit_code"), [(422, 2), (413, 2), (400, 2), (401, 1), (404, 1), (409, 1), (500, 1)]
)
def test_a_problem_becomes_an_error_whose_exit_code_tells_bad_input_from_failure(status: int, exit_code: int) -> None:
    body = {"status": status, "title": "no", "detail": "no good", "code": "x"}
    script = Script({"GET /x": Answer(body, status, "application/problem+json")})
    with serving(script), client_of(script) as client, pytest.raises(ServerProblem) as raised:
        client.get("/x")
    assert raised.value.exit_code == exit_code and raised.value.status == status


def test_a_problem_is_printed_with_pointer_value_and_suggestion() -> None:
    fault = {
        "pointer": "/train/step",
        "message": "unknown field",
        "value": "300",
        "suggestion": "steps",
    }
    problem = ServerProblem(422, {"detail": "The spec has 1 problem.", "errors": [fault]})
    assert problem.lines() == [
        "The server refuses this:",
        "  /train/step: unknown field (got 300); did you mean steps?",
    ]


def test_an_answer_that_is_no_json_is_still_an_error_with_its_status() -> None:
    """A proxy in between answers HTML."""
    script = Script({"GET /x": Answer(b"<html>", 502, "text/html")})
    with serving(script), client_of(script) as client, pytest.raises(ServerProblem, match="502"):
        client.get("/x")


def test_nobody_listening_is_said_with_the_address_and_what_to_do() -> None:
    with serving(Script({})) as script:
        url = script.url
    with Client(Address(url, "", "start it")) as client, pytest.raises(ServerUnreachable, match=f"{url}.*start it"):
        client.get("/v1/jobs")


def test_following_wakes_at_every_message_of_the_feed_and_resumes_after_the_last_one() -> None:
    """Last-Event-ID makes a new connection go on where the old one ended."""
    feed = b": hello\n\nid: 7\nevent: change\ndata: {}\n\nid: 8\nevent: change\ndata: {}\n\n"
    script = Script({"GET /v1/feed": Answer(feed, content_type="text/event-stream")})
    with serving(script), client_of(script) as client:
        wakes = client.changes("job")
        for _ in range(4):  # at once, two messages, then one of the second connection
            next(wakes)
    first, second = script.asked[:2]
    assert first.query == {"job": "job"} and "Last-Event-Id" not in first.headers
    assert {name.lower(): value for name, value in second.headers.items()}["last-event-id"] == "8"


def test_following_ends_with_an_error_when_the_server_refuses() -> None:
    """A refusal is not an absence: waiting would never end."""
    script = Script({"GET /v1/feed": Answer({"detail": "no"}, 403)})
    with serving(script), client_of(script) as client:
        wakes = client.changes("job")
        next(wakes)
        with pytest.raises(ServerProblem):
            next(wakes)


def test_following_outlives_a_server_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first connections fail as those to a port where nobody listens; then the feed is there again."""
    tries = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(200, content=b"id: 1\ndata: {}\n\n", request=request)

    monkeypatch.setattr("server.cli.client.RETRY_SECONDS", 0.0)
    with Client(Address("http://127.0.0.1:9", "", ""), httpx.MockTransport(answer)) as client:
        wakes = client.changes("job")
        next(wakes)
        next(wakes)
    assert tries == 3


def test_watching_a_job_outlives_a_server_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the feed and the question for the job may meet the gap."""
    answers = iter(
        [None, None, httpx.Response(200, json={"status": "running"}), httpx.Response(200, content=b"data: {}\n\n")]
    )

    def answer(request: httpx.Request) -> httpx.Response:
        found = next(answers, httpx.Response(200, json={"status": "succeeded"}))
        if found is None:
            raise httpx.ConnectError("refused", request=request)
        return found

    monkeypatch.setattr("server.cli.client.RETRY_SECONDS", 0.0)
    with Client(Address("http://127.0.0.1:9", "", ""), httpx.MockTransport(answer)) as client:
        job = wait_for(Session(client, Output()), "job", lambda job: job["status"] == "succeeded")
    assert job == {"status": "succeeded"}


def test_a_server_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    monkeypatch.setattr("server.cli.client.RETRY_SECONDS", 0.0)
    monkeypatch.setattr("server.cli.client.GONE_SECONDS", 0.0)
    with Client(Address("http://127.0.0.1:9", "", "start it"), httpx.MockTransport(answer)) as client:
        wakes = client.changes("job")
        next(wakes)
        with pytest.raises(ServerUnreachable, match="start it"):
            next(wakes)


def test_a_submission_whose_answer_was_lost_is_sent_again_under_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a server that restarts in between would leave the user with two jobs, or none."""
    keys = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) < 3:
            raise httpx.ReadError("reset", request=request)
        return httpx.Response(201, json={"id": "1"}, request=request)

    monkeypatch.setattr("server.cli.client.RETRY_SECONDS", 0.0)
    with Client(Address("http://127.0.0.1:9", "", ""), httpx.MockTransport(answer)) as client:
        assert client.post_once("/v1/jobs", {}, "k") == {"id": "1"}
        keys.clear()
        monkeypatch.setattr("server.cli.client.LOST_ANSWERS", 0)
        with pytest.raises(ServerUnreachable):
            client.post_once("/v1/jobs", {}, "k")
    assert keys == ["k"]
