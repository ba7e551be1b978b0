"""What was wrong with a request."""

from __future__ import annotations

from pydantic import Field

from server.states import Action, Status
from server.views.view import View


class FieldProblem(View):
    """One thing wrong with the request, where it stands and what would be right."""

    pointer: str = Field(
        description="RFC 6901 pointer into the body, or the name of a query parameter",
        examples=["/train/learning_rate"],
    )
    message: str
    value: str | None = Field(default=None, description="what was sent, shortened")
    suggestion: str | None = None
    line: int | None = Field(default=None, description="1-based, when the body was YAML")
    column: int | None = Field(default=None, description="1-based, when the body was YAML")


class Problem(View):
    """RFC 9457 problem details; every answer of 400 and above carries one as application/problem+json."""

    type: str = Field(default="about:blank", examples=["urn:shardyard:problem:invalid_spec"])
    title: str
    status: int
    detail: str
    code: str = Field(description="stable name of the kind of error", examples=["invalid_spec", "illegal_action"])
    instance: str | None = None
    errors: list[FieldProblem] = Field(default=[])
    job_status: Status | None = Field(default=None, description="present state, when an action was impossible")
    allowed_actions: list[Action] | None = Field(default=None, description="what the present state allows")
