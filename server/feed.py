"""The live feed: one reader of the changes per process, fanned out to every open tab.

Note: why the feed goes through the database. API and controller may be different processes, and several APIs may run.
Each change is a row written in the transaction that made it; ids grow in commit order, so that "everything after my
last id" is exact. A tab that was away sends Last-Event-ID and gets what it missed, or `reset` when that is not kept.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

from sqlalchemy.exc import DBAPIError

from server.db import Database
from server.rows import feed as rows
from server.rows.feed import FeedEntry

log = logging.getLogger("shardyard.feed")

POLL_SECONDS = 0.25  # changes made by other processes are seen this late
HEARTBEAT_SECONDS = 15.0
PRUNE_EVERY = 2400  # polls
QUEUE_LENGTH = 2000  # of one tab; a tab that falls further behind is told to fetch everything again


@dataclass(eq=False)
class Subscriber:
    """One open tab."""

    job_id: str | None  # None: everything
    queue: asyncio.Queue[FeedEntry] = field(default_factory=lambda: asyncio.Queue(QUEUE_LENGTH))
    overflowed: bool = False

    def offer(self, entry: FeedEntry) -> None:
        """Queue an entry if it concerns this tab."""
        if not concerns(entry, self.job_id):
            return
        try:
            self.queue.put_nowait(entry)
        except asyncio.QueueFull:
            self.overflowed = True


def concerns(entry: FeedEntry, job_id: str | None) -> bool:
    """Whether a tab that watches `job_id` (None: everything) wants this; what belongs to no job goes to all."""
    return job_id is None or entry.job_id in (job_id, None)


class Feed:
    """The reader and its tabs. `start()` in the app's lifespan, `close()` at its end."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._subscribers: set[Subscriber] = set()
        self._wake = asyncio.Event()
        self._closed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.last_id = 0

    async def start(self) -> None:
        """Begin reading after the newest change."""
        async with self._database.read() as connection:
            self.last_id = (await rows.span(connection)).newest
        self._task = asyncio.create_task(self._run(), name="feed")

    async def close(self) -> None:
        """End every open stream and the reader."""
        self._closed.set()
        self._wake.set()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def wake(self) -> None:
        """This process changed something: read now."""
        self._wake.set()

    @property
    def num_subscribers(self) -> int:
        """Open tabs."""
        return len(self._subscribers)

    async def stream(self, job_id: str | None, last_id: int | None) -> AsyncIterator[str]:
        """SSE text for one tab: what it missed since `last_id`, then everything as it comes, with heartbeats."""
        if not self._subscribers:
            await self._read()  # nobody listened, so nobody read
        subscriber = Subscriber(job_id)
        self._subscribers.add(subscriber)
        try:
            sent = self.last_id
            yield f"retry: 1000\nid: {sent if last_id is None else last_id}\nevent: hello\ndata: {{}}\n\n"
            if last_id is not None:
                async for entry in self._missed(last_id):
                    if entry is None:
                        yield _reset(self.last_id)
                    elif concerns(entry, job_id):
                        yield _message(entry)
                    sent = self.last_id if entry is None else entry.id
            async for text in self._live(subscriber, sent):
                yield text
        finally:
            self._subscribers.discard(subscriber)

    async def _missed(self, last_id: int) -> AsyncIterator[FeedEntry | None]:
        """Changes after `last_id` up to now; a single None when they are no longer kept."""
        async with self._database.read() as connection:
            span = await rows.span(connection)
        if last_id > span.newest or last_id < span.oldest - 1:
            yield None
            return
        while True:
            async with self._database.read() as connection:
                entries = await rows.after(connection, last_id)
            for entry in entries:
                yield entry
            if not entries:
                return
            last_id = entries[-1].id

    async def _live(self, subscriber: Subscriber, sent: int) -> AsyncIterator[str]:
        closed = asyncio.create_task(self._closed.wait())
        waiting: asyncio.Task[FeedEntry] | None = None
        try:
            while not self._closed.is_set():
                waiting = asyncio.create_task(subscriber.queue.get())
                await asyncio.wait({waiting, closed}, timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    waiting.cancel()
                    yield ": still here\n\n"
                    continue
                entry = waiting.result()
                if subscriber.overflowed:
                    subscriber.overflowed = False
                    while not subscriber.queue.empty():
                        subscriber.queue.get_nowait()
                    sent = self.last_id
                    yield _reset(sent)
                elif entry.id > sent:
                    sent = entry.id
                    yield _message(entry)
        finally:
            closed.cancel()
            if waiting is not None:
                waiting.cancel()

    async def _run(self) -> None:
        polls = 0
        while not self._closed.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL_SECONDS)
            self._wake.clear()
            polls += 1
            try:
                if self._subscribers:
                    await self._read()
                if polls % PRUNE_EVERY == 0:
                    async with self._database.write() as tx:
                        await rows.prune(tx)
            except DBAPIError as error:
                log.warning("feed.database_error error=%s", error)

    async def _read(self) -> None:
        if not self._subscribers:  # whoever comes next begins with what is newest then
            async with self._database.read() as connection:
                self.last_id = (await rows.span(connection)).newest
            return
        async with self._database.read() as connection:
            entries = await rows.after(connection, self.last_id)
        for entry in entries:
            self.last_id = entry.id
            for subscriber in self._subscribers:
                subscriber.offer(entry)
        if len(entries) == 1000:
            self._wake.set()


def _message(entry: FeedEntry) -> str:
    data = json.dumps({"topic": entry.topic, "job_id": entry.job_id})
    return f"id: {entry.id}\nevent: change\ndata: {data}\n\n"


def _reset(last_id: int) -> str:
    return f"id: {last_id}\nevent: reset\ndata: {{}}\n\n"
