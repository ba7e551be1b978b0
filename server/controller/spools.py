"""What the ranks of an ended attempt wrote on this machine and nobody sent: taken in from their folders.

Note: why the controller reads spools itself
A rank's actor sends its spool, and the agent of the node does when the actor has died. Both can die at once, with the
head that ran them, while the server was away for hours; the folders of the ranks remain. Once an attempt is released
nobody else reads them, so they are sent from here, by the same sender and applied under the same numbers: what an
actor had sent already is not applied again.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from pydantic import ValidationError
from sqlalchemy import select

from server.controller.leader import Leadership
from server.errors import ApiError
from server.models import ReportSeq
from server.rows import attempts, reports
from server.settings import Settings
from workers.contract import SPOOL_FILE, ReportBatch
from workers.spool_sender import Answer, Origin, SpoolSender

log = logging.getLogger("shardyard.spools")


async def take_in(leadership: Leadership, settings: Settings, attempt_id: str) -> None:
    """Apply what the ranks of a released attempt left unsent in their folders below `settings.ranks_dir`."""
    async with leadership.write() as tx:
        attempt = await attempts.get(tx.connection, attempt_id)
        closed = select(ReportSeq.rank).where(ReportSeq.attempt_id == attempt_id, ReportSeq.closed)
        done = set((await tx.execute(closed)).scalars())
    for rank in range(attempt.ranks if attempt else 0):
        folder = settings.ranks_dir / attempt_id / str(rank)
        if attempt is not None and rank not in done and (folder / SPOOL_FILE).exists():
            origin = Origin(attempt_id, attempt.number, rank)
            await _send(leadership, settings, folder, origin)


async def _send(leadership: Leadership, settings: Settings, folder: Path, origin: Origin) -> None:
    loop = asyncio.get_running_loop()

    def post(body: bytes) -> tuple[Answer, int]:
        return asyncio.run_coroutine_threadsafe(_apply(leadership, body, settings.log_bytes_per_attempt), loop).result()

    sender = SpoolSender(folder, origin, post)
    sender.ended.set()
    answer: Answer | None = "applied"
    while answer == "applied" and not sender.closed:
        answer = await asyncio.to_thread(sender.step)
    log.info("spool.taken_in attempt=%s rank=%d closed=%s", origin.attempt_id, origin.rank, sender.closed)


async def _apply(leadership: Leadership, body: bytes, log_bytes: int) -> tuple[Answer, int]:
    """As the reports route does."""
    try:
        batch = ReportBatch.model_validate_json(body)
        async with leadership.write() as tx:
            return "applied", (await reports.apply(tx, batch, log_bytes)).seq
    except ValidationError:
        return "refused", 0
    except ApiError as error:
        return ("refused" if error.status_code == 422 else "forbidden"), 0
