"""The plan of a spec for the API: what `workers/planner.py` computes for the nodes at hand. Pure numbers, no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from server.db import Database
from server.errors import invalid
from server.rows import nodes
from server.views import NodeView, PlanView
from workers.calibrations import Known, known_calibration
from workers.data.errors import DataError
from workers.planner import NeedsModel, Where, plan_spec
from workers.spec import JobSpec


async def predict(spec: JobSpec, database: Database, data_dir: Path) -> PlanView | None:
    """The plan, or None when the model is the user's own and has to be built first. Raises ApiError 422.

    `data_dir`: where this machine's calibration is kept.
    """
    async with database.read() as connection:
        where = where_of(spec, await nodes.views(connection), data_dir)
    try:
        plan = await asyncio.to_thread(plan_spec, spec, where)
    except NeedsModel:
        return None
    except DataError as error:
        raise invalid(error.pointer, str(error)) from error
    except OSError as error:
        raise invalid("/data/path", str(error)) from error
    return PlanView.model_validate(plan.model_dump())


def where_of(spec: JobSpec, known: Sequence[NodeView], data_dir: Path | None = None) -> Where:
    """The machine that a plan is for: the smallest device of the kind that the spec would get."""
    living = [node for node in known if node.alive]
    kind = spec.resources.device
    device = kind if kind != "auto" else ("cuda" if any(node.device == "cuda" for node in living) else "cpu")
    fitting = [node for node in living if node.device == device]
    threads = spec.resources.threads_per_rank
    measured = Known(None, "") if data_dir is None else known_calibration(data_dir, device, threads)
    return Where(
        device=device,
        device_memory_bytes=min((node.device_memory_bytes for node in fitting), default=None),
        rates=measured.rates,
        rates_note=measured.note,
        one_node=len(fitting) <= 1 or any(node.slots >= spec.resources.ranks for node in fitting),
    )
