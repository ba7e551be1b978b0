"""Numbers over steps, as curves and as statistics."""

from __future__ import annotations

from pydantic import AwareDatetime, Field

from server.views.view import View
from workers.contract import Number


class PointView(View):
    """A step, or the run of steps that it stands for with their min and max; value None is a gap (non-finite)."""

    step: int
    at: AwareDatetime
    value: Number | None
    min: Number | None
    max: Number | None


class NonFiniteMark(View):
    """A non-finite value at a step."""

    step: int
    value: Number


class SeriesView(View):
    """One line of a chart. The newest attempt's line is the default view; older attempts follow as branches."""

    name: str
    rank: int | None
    attempt: int
    branch: bool = Field(description="true: steps that a newer attempt replaced")
    unit: str | None
    points: list[PointView]
    non_finite: list[NonFiniteMark]
    non_finite_count: int
    count: int = Field(description="raw points in the asked range")
    steps_per_point: int = Field(description="1: raw points; else steps per rollup bucket read")
    error: str | None = Field(default=None, description="this series could not be read; the others can")


class MetricsView(View):
    """Series of a job, each at most about `width` points."""

    job_id: str
    width: int
    series: list[SeriesView]


class SeriesStatsView(View):
    """One series in numbers, without its points."""

    name: str
    rank: int | None
    attempt: int
    unit: str | None
    count: int
    non_finite_count: int
    out_of_order_count: int
    first_step: int | None
    last_step: int | None
    last: Number | None
    min: Number | None
    max: Number | None


class SeriesNamesView(View):
    """Which series a job has."""

    job_id: str
    series: list[SeriesStatsView]
