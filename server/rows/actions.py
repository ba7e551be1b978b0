"""What people do to jobs: the decision of `states.py`, guarded and written in one transaction."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from server.db import Tx
from server.errors import ApiError, not_found
from server.rows import checkpoints, events, jobs, needs, plans
from server.rows.checkpoints import USABLE
from server.rows.jobs import JobRecord
from server.rows.users import Principal
from server.states import Action, Decision, Desired, Status, allowed_actions, decide
from server.views import FieldProblem
from workers.contract import ResumeRequest
from workers.spec import JobSpec, parse_spec


@dataclass(frozen=True)
class Outcome:
    """What an action came to."""

    job_id: str
    status: Status
    changed: bool  # False: the state already satisfied it


async def act(
    tx: Tx, action: Action, job: JobRecord, who: Principal, *, values: Mapping[str, Any] | None = None
) -> Outcome:
    """Do `action` to a locked job. Raises ApiError 409 with the present state when it is impossible."""
    decision = decide(action, job.status, job.desired)
    if decision.verdict == "impossible":
        raise impossible(action, job)
    if decision.verdict == "satisfied":
        return Outcome(job.id, job.status, changed=False)
    if decision.status is job.status:  # stopping, and now harder
        await _rise(tx, job, decision, who, action)
        return Outcome(job.id, job.status, changed=True)
    moved = await jobs.transition(
        tx,
        job.id,
        decision.status,
        actor=f"user:{who.name}",
        reason=decision.reason or action,
        data={"actor": who.name},
        allowed=[job.status],
        desired=decision.desired,
        values=values,
    )
    assert moved is not None, f"{action} of locked job {job.id} in {job.status} moved nothing"
    return Outcome(job.id, decision.status, changed=True)


async def cancel_waiting(tx: Tx, job_ids: Collection[str], who: Principal) -> set[str]:
    """Cancel those of `job_ids` that wait (queued or paused) and that `who` may change; returns which."""
    mine = job_ids if who.role == "admin" else await jobs.owned(tx.connection, job_ids, who.name)
    done: set[str] = set()
    for status in (Status.QUEUED, Status.PAUSED):
        decision = decide(Action.CANCEL, status, Desired.RUN)
        done |= await jobs.transition_many(
            tx,
            mine,
            status,
            decision.status,
            actor=f"user:{who.name}",
            reason=decision.reason or Action.CANCEL,
            desired=decision.desired,
            data={"actor": who.name},
        )
    return done


def impossible(action: Action, job: JobRecord, why: str = "") -> ApiError:
    """409 with the present state and what it allows."""
    detail = why or f"A job that is {job.status} cannot be asked to {action}."
    allowed = allowed_actions(job.status, job.desired)
    return ApiError(409, detail, code="illegal_action", job_status=job.status, allowed_actions=allowed)


async def resume(tx: Tx, job: JobRecord, who: Principal, request: ResumeRequest, max_ranks: int) -> Outcome:
    """Queue a resting job again, with other ranks, stage or more steps when asked.

    Raises ApiError 409 when the state, the steps or the checkpoints do not allow it; 404 and 422 for a wrong request.
    """
    spec = resumed_spec(job, request, max_ranks)
    decision = decide(Action.RESUME, job.status, job.desired)
    if decision.verdict == "satisfied" and (spec != job.job_spec() or request.checkpoint is not None):
        raise impossible(Action.RESUME, job, f"The job is {job.status} already; stop it before it goes on otherwise.")
    if decision.verdict == "apply":
        await _check_start(tx, job, spec, request.checkpoint)
    values: dict[str, Any] = {
        "spec": spec.model_dump(mode="json"),
        "ranks": spec.resources.ranks,
        "stage": spec.zero.stage if isinstance(spec.zero.stage, int) else None,
        "steps": spec.train.steps,
        "not_before": None,
        "resume_checkpoint": request.checkpoint,
        "user_failures": 0,
        "infrastructure_failures": 0,
        "progress_step": 0,
    }
    outcome = await act(tx, Action.RESUME, job, who, values=values)
    if outcome.changed:
        await plans.renew(tx, job.owner, job.id, job.spec, values["spec"])
    return outcome


def resumed_spec(job: JobRecord, request: ResumeRequest, max_ranks: int) -> JobSpec:
    """The job's spec with what the request changes, validated again. Raises ApiError 422, SpecError."""
    spec = dict(job.spec)
    spec["train"] = {**spec["train"], "chunk": job.chunk}  # the number is kept: it is part of the bits
    if request.ranks is not None:
        if request.ranks > max_ranks:
            raise too_many_ranks("/ranks", request.ranks, max_ranks)
        spec["resources"] = {**spec["resources"], "ranks": request.ranks}
    if request.zero is not None:
        spec["zero"] = {**spec["zero"], **request.zero.model_dump(mode="json", include=request.zero.model_fields_set)}
    if request.train is not None:
        spec["train"] = {**spec["train"], "steps": request.train.steps}
    return parse_spec(spec)


def too_many_ranks(pointer: str, ranks: int, max_ranks: int) -> ApiError:
    """422 for more ranks than this service ever starts."""
    message = f"{ranks} ranks are more than the {max_ranks} that this service allows"
    problem = FieldProblem(pointer=pointer, message=message, value=str(ranks), suggestion=str(max_ranks))
    return ApiError(422, message + ".", code="invalid_spec", errors=[problem])


async def _check_start(tx: Tx, job: JobRecord, spec: JobSpec, checkpoint_id: str | None) -> None:
    start = 0
    if checkpoint_id is not None:
        found = await checkpoints.find(tx.connection, checkpoint_id)
        if found is None or (found.job_id != job.id and found.id != job.forked_from):
            raise not_found("checkpoint of this job", checkpoint_id)
        if found.status not in USABLE:
            raise impossible(Action.RESUME, job, f"The checkpoint of step {found.step} is {found.status}.")
        start = found.step
    else:
        newest = await checkpoints.beginning(tx.connection, job.id)
        if newest is None and job.step > 0:
            raise ApiError(
                409,
                f"{job.step} steps were done and no usable checkpoint is left; clone the job to start again.",
                code="no_checkpoint",
                job_status=job.status,
                allowed_actions=allowed_actions(job.status, job.desired),
            )
        start = newest.step if newest else 0
    if start >= spec.train.steps:
        why = f"All {spec.train.steps} steps are done at step {start}; ask for more with train.steps."
        raise impossible(Action.RESUME, job, why)


async def delete(tx: Tx, job: JobRecord, who: Principal) -> Outcome:
    """Ask for the removal of an ended job. Raises ApiError 409 while another job needs one of its checkpoints."""
    others = await needs.by_others(tx.connection, job.id)
    if others:
        names = ", ".join(sorted({f"{need.job_name!r} ({need.job_id[-8:]})" for need in others}))
        raise impossible(Action.DELETE, job, f"A checkpoint of it is needed by {names}, forked from it.")
    return await act(tx, Action.DELETE, job, who)


async def _rise(tx: Tx, job: JobRecord, decision: Decision, who: Principal, action: Action) -> None:
    await jobs.set_values(
        tx, job.id, desired=decision.desired, desired_at=tx.now, reason=decision.reason, reason_data={"actor": who.name}
    )
    await events.append(
        tx,
        job.id,
        f"job.{action}_requested",
        f"{who.name} asked for {action}; the job was stopping already.",
        actor=f"user:{who.name}",
        cause="stop_requested",
        old=job.status,
        new=job.status,
        attempt=job.attempt or None,
        data={"desired": decision.desired, "was": job.desired},
    )
