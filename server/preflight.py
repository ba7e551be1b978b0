"""The preflight of a resume or fork: the checkpoint's layout at the ranks and stage asked for. Pure; no torch.

The bytes that each rank reads come from `zero_engine.reshard`, those that it needs from the engine's own plan of the
layout in the manifest: a user's model is known here without being built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.rows.checkpoints import USABLE, CheckpointRef
from server.views import PassedOver, PreflightView, StagePlan
from workers.planner import SpecPlan, Where, parameters_of, plan_parameters
from workers.spec import JobSpec
from zero_engine.manifest import Manifest
from zero_engine.reshard import bytes_to_read


@dataclass(frozen=True)
class Beginning:
    """Where a resume would begin."""

    point: CheckpointRef
    manifest: Manifest


def preflight(
    job_id: str, spec: JobSpec, begins: Beginning | None, newer: Sequence[CheckpointRef], where: Where
) -> PreflightView:
    """What it would read and need. Raises NeedsModel for a user's model without any checkpoint."""
    plan = _plan(spec, begins, where)
    stage = plan.advised_stage if spec.zero.stage == "auto" else spec.zero.stage
    ranks = spec.resources.ranks
    chosen = plan.stages[stage]
    manifest = begins.manifest if begins else None
    return PreflightView(
        job_id=job_id,
        checkpoint=begins.point.id if begins else None,
        step=begins.point.step if begins else 0,
        steps=spec.train.steps,
        passed_over=[_passed(each) for each in newer],
        from_ranks=manifest.ranks if manifest else None,
        from_stage=manifest.stage if manifest else None,
        ranks=ranks,
        stage=stage,
        resharded=manifest is not None and (manifest.ranks, manifest.stage) != (ranks, stage),
        checkpoint_bytes=manifest.total_bytes if manifest else 0,
        read_bytes=list(bytes_to_read(manifest.layout, manifest.moments, ranks, stage)) if manifest else [0] * ranks,
        plan=StagePlan.model_validate(chosen.model_dump()),
        device_memory_bytes=plan.device_memory_bytes,
        fits=chosen.fits,
        note=plan.note,
    )


def passed_over(existing: Sequence[CheckpointRef], point: CheckpointRef | None) -> list[CheckpointRef]:
    """Damaged checkpoints that are newer than the one taken, newest first; `existing` are of one job."""
    damaged = [each for each in existing if each.status not in USABLE]
    if point is not None and any(each.id == point.id for each in existing):
        damaged = [each for each in damaged if (each.attempt, each.step) > (point.attempt, point.step)]
    return sorted(damaged, key=lambda each: (each.attempt, each.step), reverse=True)


def _plan(spec: JobSpec, begins: Beginning | None, where: Where) -> SpecPlan:
    if begins is None:
        return plan_parameters(parameters_of(spec), spec, where)
    return plan_parameters([entry.spec for entry in begins.manifest.layout.canonical_entries], spec, where)


def _passed(ref: CheckpointRef) -> PassedOver:
    return PassedOver(checkpoint=ref.id, step=ref.step, attempt=ref.attempt, why=ref.problem or f"it is {ref.status}")
