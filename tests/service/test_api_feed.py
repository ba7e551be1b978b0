"""The feed: what changes as it changes, replayed after an absence, cheap for the server whoever comes and goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from server import feed as feed_module
from server.feed import Feed
from server.rows import feed as rows
from tests.service.conftest import ADMIN_TOKEN, Api
from tests.service.reports_by_hand import start_attempt
from tests.waiting import PATIENCE_SECONDS


async def _messages(feed: Feed, job: str | None, last_id: int | None, number: int) -> list[dict[str, Any]]:
    """The next `number` messages of a tab, without the greeting and heartbeats."""
    found: list[dict[str, Any]] = []
    stream = feed.stream(job, last_id)
    try:
        async for text in stream:
            fields = dict(line.split(": ", 1) for line in text.strip().splitlines() if ": " in line)
            if fields.get("event") in ("change", "reset"):
                found.append({"id": int(fields["id"]), "event": fields["event"], **json.loads(fields["data"])})
            if len(found) == number:
                return found
    finally:
        await stream.aclose()  # type: ignore[attr-defined]
    return found


def _feed(api: Api) -> Feed:
    feed: Feed = api.app.state.feed
    return feed


async def _subscribed(feed: Feed, number: int) -> None:
    while feed.num_subscribers != number:
        await asyncio.sleep(0)


async def test_a_tab_hears_of_a_change_when_it_is_committed(api: Api) -> None:
    """A submit: the job, the queue and the events, each once, with growing ids."""
    listening = asyncio.create_task(_messages(_feed(api), None, None, 3))
    await _subscribed(_feed(api), 1)
    job = await api.submit()
    heard = await asyncio.wait_for(listening, PATIENCE_SECONDS)
    assert {(m["topic"], m["job_id"]) for m in heard} == {
        ("job", job["id"]),
        ("events", job["id"]),
        ("queue", None),
    }
    assert [m["id"] for m in heard] == sorted({m["id"] for m in heard})


async def test_after_an_absence_a_tab_gets_exactly_what_it_missed(api: Api) -> None:
    """From any point of the past: no gap, no repeat, in order."""
    for index in range(4):
        await api.submit(f"{index}")
    async with api.database.read() as connection:
        everything = await rows.after(connection, 0)
    ids = [entry.id for entry in everything]
    for place in range(len(ids)):
        missed = await asyncio.wait_for(_messages(_feed(api), None, ids[place] - 1, len(ids) - place), PATIENCE_SECONDS)
        assert [m["id"] for m in missed] == ids[place:]


async def test_what_comes_between_replay_and_listening_is_neither_lost_nor_doubled(api: Api) -> None:
    """Writers go on while a tab is replayed."""
    await api.submit("first")
    listening = asyncio.create_task(_messages(_feed(api), None, 0, 33))
    await asyncio.gather(*(api.submit(f"{i}") for i in range(10)))
    heard = [m["id"] for m in await asyncio.wait_for(listening, PATIENCE_SECONDS)]
    assert heard == sorted(set(heard)) and heard == list(range(heard[0], heard[0] + 33))


async def test_a_tab_of_one_job_hears_of_it_and_of_what_belongs_to_no_job(api: Api) -> None:
    """The others' changes do not reach it."""
    mine, other = await api.submit("mine"), await api.submit("other")
    heard = await asyncio.wait_for(_messages(_feed(api), mine["id"], 0, 4), PATIENCE_SECONDS)
    assert {m["job_id"] for m in heard} == {mine["id"], None}
    assert other["id"] not in {m["job_id"] for m in heard}


async def test_a_tab_that_was_away_too_long_is_told_to_fetch_everything(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`reset` when its place is no longer kept, or is from another database; then it goes on from now."""
    monkeypatch.setattr(rows, "KEPT", 2)
    for index in range(5):
        await api.submit(f"{index}")
    async with api.database.write() as tx:
        await rows.prune(tx)
    for last_id in (1, 10**9):
        (told,) = await asyncio.wait_for(_messages(_feed(api), None, last_id, 1), PATIENCE_SECONDS)
        assert told["event"] == "reset"


async def test_a_tab_that_cannot_keep_up_is_told_so_and_costs_a_bounded_queue(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One `reset` instead of the flood; then it goes on from now."""
    monkeypatch.setattr(feed_module, "QUEUE_LENGTH", 3)
    feed = _feed(api)
    stream = feed.stream(None, None)
    assert "hello" in await anext(stream)
    before = feed.last_id
    for number in range(5):
        await api.submit(f"{number}")
    while feed.last_id < before + 15:
        await asyncio.sleep(0)
    assert "reset" in await anext(stream)
    last = asyncio.ensure_future(anext(stream))
    await api.submit("one more")
    assert "change" in await asyncio.wait_for(last, PATIENCE_SECONDS)
    await stream.aclose()  # type: ignore[attr-defined]


async def test_tabs_that_come_and_go_leave_nothing(api: Api) -> None:
    """Three hundred times: no subscriber and no task is left."""
    feed = _feed(api)
    before = len(asyncio.all_tasks())
    for _ in range(300):
        stream = feed.stream(None, 0)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
    assert feed.num_subscribers == 0
    assert len(asyncio.all_tasks()) <= before + 1


@asynccontextmanager
async def _served(api: Api) -> AsyncIterator[str]:
    """The app on a real socket; it ends by itself when told, also with open streams."""
    config = uvicorn.Config(
        api.app, host="127.0.0.1", port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, PATIENCE_SECONDS)


async def test_fifty_followers_over_sockets_leave_the_api_free_and_are_gone_when_they_hang_up(api: Api) -> None:
    """Each hears of a change; meanwhile requests are answered; afterwards no stream is left."""
    job = await api.submit()
    rank = await start_attempt(api.database, job["id"])
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    async with (
        _served(api) as url,
        httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_SECONDS) as client,
    ):

        async def follow() -> str:
            async with client.stream("GET", "/v1/feed", params={"job": job["id"]}) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                async for line in answer.aiter_lines():
                    if '"metrics"' in line:
                        return line
            raise AssertionError("the stream ended")

        client._transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=100))
        followers = [asyncio.create_task(follow()) for _ in range(50)]
        while _feed(api).num_subscribers < 50:
            assert (await client.get("/v1/jobs")).status_code == 200
        await rank.points(api, {1: {"loss": 1.0}})
        assert len(await asyncio.wait_for(asyncio.gather(*followers), PATIENCE_SECONDS)) == 50
        await asyncio.wait_for(_subscribed(_feed(api), 0), PATIENCE_SECONDS)
