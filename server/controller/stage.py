"""`zero.stage: auto` becomes a number before an attempt starts."""

from __future__ import annotations

from collections.abc import Callable

from workers.spec import JobSpec

Resolve = Callable[[JobSpec, str], JobSpec]  # (spec, device) -> spec with a stage; ValueError: it cannot run


def with_stage(spec: JobSpec, stage: int) -> JobSpec:
    """The same spec with the stage as a number."""
    zero = spec.zero.model_copy(update={"stage": stage})
    return spec.model_copy(update={"zero": zero})


def resolve_stage(spec: JobSpec, device: str) -> JobSpec:
    """The spec with its stage as a number."""
    return with_stage(spec, 0) if spec.zero.stage == "auto" else spec
