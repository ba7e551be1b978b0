"""Nodes of the cluster and who holds their slots; the controller refreshes them, the API reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from server.controller.cluster import Node
from server.db import Tx
from server.models import Attempt, Job, NodeRow, RankRow
from server.states import AttemptStatus
from server.views import Holder, NodeView


@dataclass(frozen=True)
class SlotTotals:
    """Slots of all living nodes."""

    total: int
    free: int


async def replace(tx: Tx, nodes: Sequence[Node]) -> None:
    """Write what the cluster looks like now; the feed is told only of a difference."""
    known = [_node(view) for view in await views(tx.connection)]
    await tx.execute(delete(NodeRow))
    if nodes:
        await tx.execute(insert(NodeRow), [_values(node, tx.now) for node in nodes])
    if sorted(known, key=lambda n: n.id) != sorted(nodes, key=lambda n: n.id):
        tx.changed("nodes")


async def views(connection: AsyncConnection) -> list[NodeView]:
    """Every node with the ranks on it, by id."""
    rows = (await connection.execute(select(NodeRow.__table__).order_by(NodeRow.id))).all()
    holders = await _holders(connection)
    return [NodeView.model_validate({**row._mapping, "holders": holders.get(row.id, [])}) for row in rows]


async def slot_totals(connection: AsyncConnection) -> SlotTotals:
    """Slots of living nodes, all and free."""
    rows = (await connection.execute(select(NodeRow.slots, NodeRow.free_slots).where(NodeRow.alive))).all()
    return SlotTotals(sum(row.slots for row in rows), sum(row.free_slots for row in rows))


async def _holders(connection: AsyncConnection) -> dict[str, list[Holder]]:
    statement = (
        select(RankRow.node, RankRow.rank, Attempt.number, Job.id, Job.name)
        .join(Attempt, Attempt.id == RankRow.attempt_id)
        .join(Job, Job.id == Attempt.job_id)
        .where(Attempt.status != AttemptStatus.RELEASED, RankRow.node.is_not(None))
        .order_by(Job.id, RankRow.rank)
    )
    found: dict[str, list[Holder]] = {}
    for node, rank, number, job_id, name in (await connection.execute(statement)).all():
        found.setdefault(node or "", []).append(Holder(job_id=job_id, job_name=name, attempt=number, rank=rank))
    return found


def _values(node: Node, now: datetime) -> dict[str, object]:
    return {
        **{name: getattr(node, name) for name in Node.__dataclass_fields__},
        "devices": list(node.devices),
        "seen_at": now,
    }


def _node(view: NodeView) -> Node:
    fields = {name: getattr(view, name) for name in Node.__dataclass_fields__}
    return Node(**{**fields, "devices": tuple(view.devices)})
