"""What the REST API answers: one frozen pydantic model per resource.

Read `view.py` first, then `jobs.py`. Units stand in the names. A number that may be NaN or infinite travels as
`Number`: JSON carries "NaN", "Infinity" and "-Infinity" as strings. Times are aware UTC. ORM rows never leave
`server/rows/`; rows make these views. Imports nothing of `server` but the states.
"""

from __future__ import annotations

from server.views.attempts import AttemptView, ErrorView, RankView, SavingView
from server.views.checkpoints import CheckpointPage, CheckpointShardView, CheckpointView, NeededBy, VerifyResult
from server.views.cluster import ExplainView, Holder, NodesView, NodeView, QueueItem, QueueView
from server.views.jobs import ActionResult, BulkResult, EventView, JobListItem, JobPage, JobView
from server.views.lineage import LineageAttempt, LineageJob, LineageLink, LineageView
from server.views.logs import LogLine, LogView
from server.views.measured import LedgerEntry, LedgerView, MemorySampleView, MemoryView, RankLedger, StageBytes
from server.views.plans import JobPlanView, PendingPlan, PlanView, StagePlan
from server.views.preflight import PassedOver, PreflightView
from server.views.problems import FieldProblem, Problem
from server.views.series import MetricsView, NonFiniteMark, PointView, SeriesNamesView, SeriesStatsView, SeriesView
from server.views.service import FeedChange, HealthView, MeView, Role, Topic
from server.views.store import AdoptedView, OrphansView, OrphanView, StoreView
from server.views.view import Item, Page, ReasonView, View

__all__ = [
    "ActionResult",
    "AdoptedView",
    "AttemptView",
    "BulkResult",
    "CheckpointPage",
    "CheckpointShardView",
    "CheckpointView",
    "ErrorView",
    "EventView",
    "ExplainView",
    "FeedChange",
    "FieldProblem",
    "HealthView",
    "Holder",
    "Item",
    "JobListItem",
    "JobPage",
    "JobPlanView",
    "JobView",
    "LedgerEntry",
    "LedgerView",
    "LineageAttempt",
    "LineageJob",
    "LineageLink",
    "LineageView",
    "LogLine",
    "LogView",
    "MeView",
    "MemorySampleView",
    "MemoryView",
    "MetricsView",
    "NeededBy",
    "NodeView",
    "NodesView",
    "NonFiniteMark",
    "OrphanView",
    "OrphansView",
    "Page",
    "PassedOver",
    "PendingPlan",
    "PlanView",
    "PointView",
    "PreflightView",
    "Problem",
    "QueueItem",
    "QueueView",
    "RankLedger",
    "RankView",
    "ReasonView",
    "Role",
    "SavingView",
    "SeriesNamesView",
    "SeriesStatsView",
    "SeriesView",
    "StageBytes",
    "StagePlan",
    "StoreView",
    "Topic",
    "VerifyResult",
    "View",
]
