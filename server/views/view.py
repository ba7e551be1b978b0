"""What every answer is: frozen, without unknown fields, maybe one page of a list, maybe with a reason."""

from __future__ import annotations

from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field


class View(BaseModel):
    """Base of every answer: frozen, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


Item = TypeVar("Item")


class Page(View, Generic[Item]):
    """One page of a list; `next_cursor` is opaque and None at the end."""

    items: list[Item]
    next_cursor: str | None = None


class ReasonView(View):
    """Why a job or attempt is in its state: a stable code and the sentence shown to people."""

    code: str = Field(examples=["no_capacity"])
    sentence: str
