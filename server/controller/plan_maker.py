"""Makes the plans that are waited for: of users' models, each built in a process of its own, and of jobs that changed.

A request waits in the database until its plan, or why there is none, is written: a controller that is killed meanwhile
leaves it to the next. Nothing but a job whose stage is automatic waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from server.controller.leader import Leadership
from server.db import Database
from server.planning import where_of
from server.rows import nodes, plans
from server.settings import Settings
from server.views import NodeView
from workers.built_plan import plan_of
from workers.model_builder import ModelBuilder, NotBuilt
from workers.spec import JobSpec

log = logging.getLogger("shardyard.plans")
AT_ONCE = 2  # so that a model that hangs does not keep all others waiting


class PlanMaker:
    """Makes what is waited for, a few at a time; `stop` ends them."""

    def __init__(self, database: Database, settings: Settings, leadership: Leadership) -> None:
        self._database = database
        self._settings = settings
        self._leadership = leadership
        self._builder = ModelBuilder()
        self.making: dict[str, asyncio.Task[None]] = {}  # by plan_key

    async def begin(self) -> None:
        """Begin what nobody makes yet, oldest first. A job is planned for the nodes there are: once some were seen."""
        if len(self.making) >= AT_ONCE:
            return
        async with self._database.read() as connection:
            waiting, known = await plans.waiting(connection), await nodes.views(connection)
        for asked in waiting:
            key = plans.plan_key(asked.spec)
            if len(self.making) < AT_ONCE and key not in self.making and (known or asked.job_id is None):
                self.making[key] = asyncio.create_task(self._make(key, asked.spec, known), name=f"plan {asked.id}")

    async def stop(self) -> None:
        """End what is being built; the next controller begins it again."""
        tasks = list(self.making.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._builder.close()

    async def _make(self, key: str, spec: Mapping[str, Any], known: Sequence[NodeView]) -> None:
        """One plan for all who wait for it."""
        try:
            result, error = await self._planned(spec, known)
            async with self._leadership.write() as tx:
                for asked in await plans.waiting(tx.connection):
                    if plans.plan_key(asked.spec) == key:
                        await plans.finish(tx, asked, result=result, error=error)
        except Exception:  # the lease is lost, or the database is away: it still waits, and is made again
            log.exception("plan.unwritten")
        finally:
            del self.making[key]

    async def _planned(
        self, spec: Mapping[str, Any], known: Sequence[NodeView]
    ) -> tuple[dict[str, Any] | None, str | None]:
        """The plan, or why there is none."""
        try:
            wanted = JobSpec.model_validate(spec)
            plan = await plan_of(wanted, where_of(wanted, known, self._settings.data_dir), self._builder)
            return plan.model_dump(mode="json"), None
        except NotBuilt as error:
            return None, str(error)
        except Exception as error:  # whatever it is, it is a reason and never ends the controller
            log.exception("plan.failed")
            return None, f"{type(error).__name__}: {error}"
