"""What every part of a job spec is made of: its base, numbers within bounds, and an error that names its field."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1, le=2**53)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, le=1e30, allow_inf_nan=False)]


class SpecModel(BaseModel):
    """Base of every part of a spec: frozen, strict, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def wrong(pointer: str, message: str) -> PydanticCustomError:
    """An error at a field of the whole spec: `pointer` is a JSON pointer from its root."""
    return PydanticCustomError("spec", "{message}", {"pointer": pointer, "message": message})
