"""What the end of a server does to its jobs, and what the next start does about it.

Ctrl-C asks live jobs to checkpoint and pauses them with the reason `server_stopped`; the next start resumes exactly
these. What a person paused stays paused, and what a person asks for meanwhile wins, since it is more severe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import select

from server.controller.leader import Leadership
from server.db import Database
from server.models import Job
from server.rows import jobs
from server.states import LIVE, Desired, Status

REASON = "server_stopped"
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class StillLive:
    """A job that has not yet left."""

    id: str
    name: str
    status: Status
    step: int
    stop_grace_seconds: float


async def pause_live(database: Database, leadership: Leadership) -> list[StillLive]:
    """Ask every live job that nobody stops yet to pause; returns all live ones."""
    live = await still_live(database)
    for job in live:
        async with leadership.write() as tx:
            current = await jobs.lock(tx, job.id)
            if current is None or current.desired is not Desired.RUN:
                continue
            if current.status is Status.STOPPING:  # making room for another: the pause only comes on top
                await jobs.set_values(tx, job.id, desired=Desired.PAUSE, desired_at=tx.now, reason=REASON)
                continue
            await jobs.transition(
                tx, job.id, Status.STOPPING, actor="controller", reason=REASON, desired=Desired.PAUSE, cause="paused"
            )
    return live


async def wait_until_calm(database: Database, seconds: float, tell: Callable[[list[StillLive]], None]) -> bool:
    """Wait until no job is live, at most `seconds`; `tell` hears of every change. False: some are left."""
    loop = asyncio.get_running_loop()
    deadline, told = loop.time() + seconds, None
    while True:
        live = await still_live(database)
        if live != told:
            tell(live)
            told = live
        if not live:
            return True
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)


async def still_live(database: Database) -> list[StillLive]:
    """Jobs with an attempt."""
    async with database.read() as connection:
        records = await jobs.in_status(connection, LIVE)
    return [StillLive(j.id, j.name, j.status, j.step, j.spec["stop_grace_seconds"]) for j in records]


async def resume_stopped(database: Database, leadership: Leadership) -> int:
    """Put back in the queue what a stopped server had paused; returns how many."""
    async with database.read() as connection:
        statement = select(Job.id).where(Job.status == Status.PAUSED, Job.reason == REASON)
        stopped = (await connection.execute(statement)).scalars().all()
    for job_id in stopped:
        async with leadership.write() as tx:
            await jobs.transition(
                tx,
                job_id,
                Status.QUEUED,
                actor="controller",
                reason="resumed",
                allowed={Status.PAUSED},
                desired=Desired.RUN,
            )
    return len(stopped)
