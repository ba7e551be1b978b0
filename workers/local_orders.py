"""What the ranks of a run on this machine are told, without a service."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Literal

from workers.contract import AttemptId, JobId, LaunchOrder, Rank, ResumeFrom
from workers.spec import JobSpec


def local_orders(
    spec: JobSpec,
    folder: Path,
    data_dir: Path,
    port: int,
    *,
    device: Literal["cpu", "cuda"],
    fence: int,
    chunk: int,
    store_url: str,
    resume: ResumeFrom | None,
    until: int | None = None,
    digest_every: int = 0,
    retains: bool = False,
) -> list[LaunchOrder]:
    """An order for each rank of `spec`, whose stage is a number; ranks live in `folder` and measure every step.

    `port`: where rank 0 listens, on loopback.
    """
    cache = data_dir / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    name = str(uuid.uuid4())
    return [
        LaunchOrder(
            job_id=JobId(name),
            attempt_id=AttemptId(name),
            fence=fence,
            rank=Rank(rank),
            world_size=spec.resources.ranks,
            master_addr="127.0.0.1",
            master_port=port,
            device=device,
            spec=spec,
            chunk=chunk,
            rank_folder=str(folder / str(rank)),
            cache_folder=str(cache),
            store_url=store_url,
            resume=resume,
            until=until,
            digest_every=digest_every,
            retains=retains,
            sample_seconds=0.0,
        )
        for rank in range(spec.resources.ranks)
    ]
