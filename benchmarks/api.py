"""How fast the API answers over a full database. Prints a table: median and least wall time, CPU time, size.

    python benchmarks/api.py [--jobs 10000] [--points 1000000] [--url postgresql://...] [--json FILE]

Fills a fresh SQLite file (or the empty database at --url) and asks the app over ASGI, without a socket:
    jobs      one page of 50 in several orders and filters, page after page
    cancel    every queued job with one request
    chart     width 800 over one long series: from rollups, and zoomed to raw points
    report    a batch of one step and of a hundred steps, as rank 0 sends it
    manifest  a checkpoint of 10,000 shards: its report, from the request to the commit
CPU time is of this process: on a busy machine it says more than the wall.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import insert

from server.app import create_app
from server.auth import ensure_admin
from server.db import Database
from server.ids import new_id
from server.migrations import upgrade
from server.models import Job
from server.rows import attempts, jobs, new_jobs, series, users
from server.rows.attempts import NewAttempt
from server.rows.series import Owner
from server.settings import Settings
from server.states import Status
from workers.contract import PointsRecord
from workers.spec import parse_spec

MANIFEST = "manifest of 10,000 shards"
TARGET_SECONDS = {"jobs, newest first": 0.030, "chart, all of it": 0.100, MANIFEST: 1.0}
SHARDS = 10_000
SPEC = {"name": "x", "model": {"kind": "mlp"}, "data": {"kind": "digits"}, "train": {"steps": 10_000_000}}
NAMES = ("loss", "grad_norm", "lr", "tokens_per_second", "seconds", "seconds/forward", "seconds/backward", "bytes_sent")
START = datetime(2026, 11, 29, tzinfo=UTC)


async def fill_jobs(database: Database, count: int) -> None:
    """`count` jobs of all resting and waiting kinds."""
    chosen = random.Random(1)
    spec = parse_spec({**SPEC, "train": {"steps": 100}}).model_dump(mode="json")
    same = {"tags": [], "owner": "admin", "spec": spec, "spec_yaml": "x" * 300, "model_kind": "mlp", "plan": spec}
    numbers = {"chunk": 2, "micro_batches": 4, "ranks": 2, "stage": 1, "steps": 100, "priority": 50}
    async with database.write() as tx:
        rows = [
            {
                **same,
                **numbers,
                "id": new_id(),
                "name": f"job {index}",
                "name_folded": f"job {index}",
                "status": chosen.choice([Status.SUCCEEDED, Status.FAILED, Status.CANCELLED, Status.QUEUED]),
                "desired": "run",
                "reason": "submitted",
                "created_at": tx.now - timedelta(seconds=index),
                "updated_at": tx.now,
                "queued_at": tx.now,
                "loss": chosen.random() if index % 3 else None,
                "sparkline": [chosen.random() for _ in range(40)],
                "sparkline_stride": 3,
            }
            for index in range(count)
        ]
        await tx.execute(insert(Job), rows)


async def start_job(database: Database) -> tuple[str, str, str]:
    """A running job of one rank: (job id, attempt id, report token)."""
    job_id, attempt_id, secret = new_id(), new_id(), users.new_secret()
    async with database.write() as tx:
        await new_jobs.create(tx, new_jobs.NewJob(job_id, "admin", parse_spec(SPEC), "", 0, None))
        await jobs.transition(tx, job_id, Status.STARTING, actor="benchmark", reason="starting")
        token = users.secret_hash(secret)
        await attempts.create(tx, NewAttempt(attempt_id, job_id, 1, 1, 0, 4, "cpu", token))
        await jobs.transition(tx, job_id, Status.RUNNING, actor="benchmark", reason="running")
    return job_id, attempt_id, secret


async def fill_points(database: Database, owner: Owner, count: int) -> None:
    """`count` points of one series, a spike among them."""
    for first in range(1, count + 1, 50_000):
        steps = range(first, min(first + 50_000, count + 1))
        records = [PointsRecord(at=START, step=s, values={"long": math.sin(s / 1e4) + (s == 7) * 9}) for s in steps]
        async with database.write() as tx:
            await series.append(tx, owner, records)


def batch(attempt_id: str, seq: int, steps: int) -> dict[str, Any]:
    """What rank 0 sends of `steps` steps."""
    records: list[dict[str, Any]] = []
    for index in range(steps):
        step, at = seq * 1000 + index, START.isoformat()
        records.append({"kind": "points", "at": at, "step": step, "values": dict.fromkeys(NAMES, 1.0 + index)})
        records.append({"kind": "memory", "at": at, "step": step, "params": 1, "rss": 2})
        records.append({"kind": "ledger", "at": at, "step": step, "bytes": {"a": 1}, "seconds": {"a": 0.1}})
    return {"attempt_id": attempt_id, "fence": 1, "rank": 0, "seq": seq, "records": records}


async def measure(name: str, ask: Callable[[], Awaitable[httpx.Response]], repeats: int) -> dict[str, Any]:
    """One row of the table."""
    await ask()
    walls, cpu = [], time.process_time()
    for _ in range(repeats):
        begun = time.perf_counter()
        answer = await ask()
        walls.append(time.perf_counter() - begun)
        assert answer.status_code == 200, answer.text
    return {
        "what": name,
        "median_ms": round(statistics.median(walls) * 1e3, 1),
        "least_ms": round(min(walls) * 1e3, 1),
        "cpu_ms": round((time.process_time() - cpu) / repeats * 1e3, 1),
        "bytes": len(answer.content),
        "target_ms": round(TARGET_SECONDS[name] * 1e3) if name in TARGET_SECONDS else None,
    }


async def run(url: str, data_dir: Path, count: int, points: int) -> list[dict[str, Any]]:
    """Fill and measure."""
    database = Database.open(url)
    app = create_app(Settings(data_dir=data_dir), database)
    await ensure_admin(database, "token")
    await fill_jobs(database, count)
    job_id, attempt_id, secret = await start_job(database)
    await fill_points(database, Owner(job_id, attempt_id, 1, 0), points)
    transport = httpx.ASGITransport(app)
    headers = {"Authorization": "Bearer token"}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client,
    ):
        found = await pages(client)
        chart = f"/v1/jobs/{job_id}/metrics?names=long&width=800"
        middle = points // 2
        found.append(await measure("chart, all of it", lambda: client.get(chart), 10))
        zoom = f"{chart}&from_step={middle}&to_step={middle + 199}"
        found.append(await measure("chart, 200 steps of it", lambda: client.get(zoom), 10))
        found += await reports(client, attempt_id, secret)
        body = {"filter": {"status": "queued"}}
        begun, cpu = time.perf_counter(), time.process_time()
        answer = await client.post("/v1/jobs/cancel", json=body)
        wall = round((time.perf_counter() - begun) * 1e3, 1)
        spent = round((time.process_time() - cpu) * 1e3, 1)
        what = f"cancel {len(answer.json()['results'])} queued jobs"
        found.append({"what": what, "median_ms": wall, "least_ms": wall, "cpu_ms": spent, "bytes": len(answer.content)})
    await database.close()
    return found


async def pages(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """Pages of jobs, each row walking on from page to page."""
    queries = {
        "jobs, newest first": {},
        "jobs, by loss": {"sort": "loss"},
        "jobs, by loss downwards": {"sort": "-loss"},
        "jobs, by name": {"sort": "name"},
        "jobs, of two states": {"status": "queued,failed"},
        "jobs, searched": {"q": "99"},
    }
    rows = []
    for name, query in queries.items():
        cursor: list[str | None] = [None]

        async def ask(query: dict[str, str] = query, cursor: list[str | None] = cursor) -> httpx.Response:
            answer = await client.get("/v1/jobs", params={**query, **({"cursor": cursor[0]} if cursor[0] else {})})
            cursor[0] = answer.json()["next_cursor"]
            return answer

        rows.append(await measure(name, ask, 20))
    return rows


async def reports(client: httpx.AsyncClient, attempt_id: str, secret: str) -> list[dict[str, Any]]:
    """Batches of a rank."""
    seq = iter(range(1, 10_000))
    own = {"Authorization": f"Bearer {secret}"}
    rows = []
    for steps in (1, 100):

        async def ask(steps: int = steps) -> httpx.Response:
            return await client.post("/v1/reports", json=batch(attempt_id, next(seq), steps), headers=own)

        rows.append(await measure(f"report of {steps} step(s)", ask, 20))

    async def tell() -> httpx.Response:
        number = next(seq)
        body = {**batch(attempt_id, number, 0), "records": [manifest(number)]}
        return await client.post("/v1/reports", json=body, headers=own)

    rows.append(await measure(MANIFEST, tell, 5))
    return rows


def manifest(step: int) -> dict[str, Any]:
    """What rank 0 says of a checkpoint of 10,000 ranks."""
    shards = [
        {"rank": r, "file": f"rank-{r:05d}.safetensors", "bytes": 10**6, "checksum": "0" * 16} for r in range(SHARDS)
    ]
    head = {"kind": "checkpoint", "at": START.isoformat(), "step": step, "folder": f"step-{step:010d}-attempt-000001"}
    return {**head, "digest": "0" * 16, "ranks": SHARDS, "stage": 1, "shards": shards, "seconds": 1.0}


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    print(f"{'':28}{'median ms':>10}{'least ms':>10}{'CPU ms':>9}{'bytes':>10}{'target ms':>11}")
    for row in rows:
        target = row.get("target_ms") or ""
        numbers = f"{row['median_ms']:>10}{row['least_ms']:>10}{row['cpu_ms']:>9}{row['bytes']:>10}{target:>11}"
        print(f"{row['what']:28}{numbers}")


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--url", default="")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = given.url or f"sqlite:///{folder}/bench.db"
        upgrade(url)
        rows = asyncio.run(run(url, Path(folder), given.jobs, given.points))
    show(rows)
    if given.json:
        given.json.write_text(json.dumps({"python": sys.version.split()[0], "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
