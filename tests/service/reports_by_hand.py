"""Attempts and reports as a controller and ranks would make them, without either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from server.db import Database
from server.ids import new_id
from server.rows import attempts, jobs, users
from server.rows.attempts import NewAttempt
from server.states import Status
from tests.service.conftest import Api
from workers.contract import write_number

START = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def at(step: int) -> str:
    """The time of a step: one a second."""
    return (START + timedelta(seconds=min(step, 10**9))).isoformat()


def points(step: int, values: Mapping[str, float]) -> dict[str, Any]:
    """A points record."""
    return {"kind": "points", "at": at(step), "step": step, "values": {k: write_number(v) for k, v in values.items()}}


def log(text: str, stream: str = "stdout", step: int = 0) -> dict[str, Any]:
    """A log record."""
    return {"kind": "log", "at": at(step), "stream": stream, "text": text}


def phase(name: str, step: int = 0) -> dict[str, Any]:
    """A phase record."""
    return {"kind": "phase", "at": at(step), "phase": name}


def save(step: int, state: str) -> dict[str, Any]:
    """A save record."""
    return {"kind": "save", "at": at(step), "step": step, "state": state}


def checkpoint(step: int, fence: int = 1, ranks: int = 2) -> dict[str, Any]:
    """A checkpoint record."""
    return {
        "kind": "checkpoint",
        "at": at(step),
        "step": step,
        "folder": f"step-{step:09d}-attempt-{fence:04d}",
        "digest": f"{step:016x}",
        "ranks": ranks,
        "stage": 1,
        "shards": [{"rank": r, "file": f"shard-{r}.safetensors", "bytes": 100, "checksum": "x"} for r in range(ranks)],
        "seconds": 0.5,
        "eval_loss": None,
    }


@dataclass
class Rank:
    """One rank's sender: numbers its batches."""

    attempt_id: str
    fence: int
    rank: int
    token: str
    seq: int = 0
    sent: list[dict[str, Any]] = field(default_factory=list)  # every batch, for repeats

    def batch(self, *records: dict[str, Any], closed: bool = False) -> dict[str, Any]:
        """The next batch."""
        self.seq += 1
        head = {"attempt_id": self.attempt_id, "fence": self.fence, "rank": self.rank, "seq": self.seq}
        made = {**head, "records": list(records), "closed": closed}
        self.sent.append(made)
        return made

    async def post(self, api: Api, batch: dict[str, Any]) -> httpx.Response:
        """Send a batch with the attempt's token."""
        return await api.nobody.post("/v1/reports", json=batch, headers={"Authorization": f"Bearer {self.token}"})

    async def report(self, api: Api, *records: dict[str, Any], closed: bool = False) -> None:
        """Send the next batch, which must be applied."""
        answer = await self.post(api, self.batch(*records, closed=closed))
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"applied_seq": self.seq}

    async def points(self, api: Api, values: Mapping[int, Mapping[str, float]]) -> None:
        """Report points by step."""
        await self.report(api, *(points(step, each) for step, each in values.items()))

    def peer(self, rank: int) -> Rank:
        """Another rank of the same attempt."""
        return Rank(self.attempt_id, self.fence, rank, self.token)


async def start_attempt(database: Database, job_id: str, ranks: int = 2, stage: int = 1, **resume: Any) -> Rank:
    """Take a queued job to `running` with a new attempt; rank 0's sender."""
    secret, attempt_id = users.new_secret(), new_id()
    async with database.write() as tx:
        job = await jobs.get(tx.connection, job_id)
        assert job is not None
        new = NewAttempt(
            id=attempt_id,
            job_id=job_id,
            number=job.attempt + 1,
            ranks=ranks,
            stage=stage,
            chunk=job.chunk,
            device="cpu",
            token_hash=users.secret_hash(secret),
            **resume,
        )
        for status in (Status.STARTING, Status.RUNNING):
            assert await jobs.transition(tx, job_id, status, actor="controller", reason="submitted") is not None
            if status is Status.STARTING:
                assert await attempts.create(tx, new)
    return Rank(attempt_id, new.number, 0, secret)
