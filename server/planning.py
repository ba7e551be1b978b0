"""The plan of a spec for the API: what `workers/planner.py` computes, as a `PlanView`. Pure numbers, no torch."""

from __future__ import annotations

from server.db import Database
from server.views import PlanView
from workers.spec import JobSpec


async def predict(spec: JobSpec, database: Database) -> PlanView | None:
    """The plan, or None when the model is the user's own and only a rank process can look at it."""
    return None
