"""Plans that take time: made once, beside the queue, shown with how far they are, and never what a job hangs on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.db import Tx
from server.rows import actions, jobs, plans, queue
from server.states import Action, Status
from server.views import JobPlanView
from tests.service.controller_world import ADA, BOTH, World, in_world
from tests.service.plan_bodies import ACT
from workers import built_plan, model_builder
from workers.contract import ResumeRequest
from workers.planner import SpecPlan, plan_spec
from workers.spec import JobSpec

USERS = {"kind": "python", "entry": "mine:build", "path": "/nowhere"}


def builds(world: World, monkeypatch: pytest.MonkeyPatch, do: str, **how: str) -> None:
    """What every build does from now on: `hang`, `fail`, or `count` once there is a file at `gate`."""
    act = world.folder / "act"
    act.write_text(json.dumps({"do": do, **how}))
    monkeypatch.setenv(ACT, str(act))
    monkeypatch.setattr(model_builder, "ENTRY", "tests.service.plan_bodies:answer")
    monkeypatch.setattr(model_builder, "PRELOAD", ("tests.service.plan_bodies",))


def count_builds(world: World, monkeypatch: pytest.MonkeyPatch, gate: Path | None = None) -> Path:
    """Builds take a moment, or until a file is at `gate`, and come to a plan; the answer has the ranks of each made."""
    log = world.folder / "built"
    log.touch()
    builds(world, monkeypatch, "count", log=str(log), gate=str(gate or log))
    return log


async def plan(world: World, job: str) -> JobPlanView:
    async with world.database.read() as connection:
        found = await plans.of_job(connection, job)
    assert found is not None
    return found


def alike(spec: JobSpec) -> SpecPlan:
    """The plan that a counted build gives."""
    return plan_spec(JobSpec.model_validate({**spec.model_dump(), "model": {"kind": "mlp", "hidden": [8]}}))


@in_world(databases=BOTH)
async def test_an_automatic_stage_waits_for_the_plan_and_is_the_one_that_it_advises(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the queue says so, and others start."""
    gate = world.folder / "gate"
    count_builds(world, monkeypatch, gate)
    job = await world.submit(model=USERS)
    other = await world.submit("other", priority=0)
    while (await world.job(job)).reason != "being_planned" or "job.starting" not in await world.actions(other):
        await world.controller.tick()
    assert (await plan(world, job)).status == "pending"
    async with world.database.read() as connection:
        told = await queue.explain(connection, job, 64)
    assert told is not None and "names its stage" in (told.unblock or "")
    gate.touch()
    await world.until_status(job, Status.RUNNING)
    found, expected = await plan(world, job), alike((await world.job(job)).job_spec())
    assert found.status == "done" and found.predicted is not None
    assert (found.predicted.parameters, found.predicted.ranks) == (expected.parameters, 2)
    assert found.stage == found.predicted.advised_stage == (await world.attempt(job)).stage


@in_world()
async def test_a_job_that_names_its_stage_starts_beside_the_making_of_its_plan(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a controller that is killed meanwhile leaves it to the next, which makes it."""
    builds(world, monkeypatch, "hang")
    job = await world.submit(model=USERS, zero={"stage": 3})
    while (await world.job(job)).status is Status.QUEUED:
        await world.controller.tick()
    assert (await plan(world, job)).status == "pending"
    await world.controller._plan_maker.stop()
    assert (await plan(world, job)).status == "pending"
    count_builds(world, monkeypatch)
    world.restart()
    await world.look()
    found = await plan(world, job)
    assert found.status == "done" and found.stage == 3


@in_world()
async def test_a_model_that_cannot_be_built_is_said_so_in_time_and_runs_at_a_cautious_stage(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs and one that ends without a word; its ranks will say more, and a resume tries again."""
    hung, failed = "It was not built within 0.2 s.", "Its process ended with code 1."
    for do, seconds, why in (("hang", 0.2, hung), ("fail", 120.0, failed)):
        builds(world, monkeypatch, do)
        monkeypatch.setattr(built_plan, "BUILD_SECONDS", seconds)
        job = await world.submit(model=USERS)
        await world.until_status(job, Status.RUNNING)
        found = await plan(world, job)
        assert (found.status, found.failure, found.predicted) == ("failed", why, None)
        assert (await world.attempt(job)).stage == 1
        (event,) = [event for event in await world.events(job) if event.action == "plan.failed"]
        assert event.message == f"No plan can be made: {why}"
    await world.pause_after(job, 10)
    count_builds(world, monkeypatch)
    await world.act(Action.RESUME, job)
    await world.until_status(job, Status.RUNNING)
    assert (await plan(world, job)).status == "done"


@in_world()
async def test_jobs_with_one_plan_wait_for_one_build(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ in stage, rate, seed, steps and name; one of another width has a plan of its own."""
    built = count_builds(world, monkeypatch)
    same = [
        await world.submit(
            f"job {stage}", 4, stage + 1, model=USERS, zero={"stage": stage}, restart={"user_failures": stage}
        )
        for stage in range(4)
    ]
    tuned = {"steps": 9, "global_batch": 16, "micro_batch": 1, "seed": 7, "optimizer": {"lr": 0.1}}
    same.append(await world.submit("tuned", 4, model=USERS, train=tuned))
    wider = await world.submit("wider", 4, model={**USERS, "kwargs": {"width": 2}})
    await world.look()
    for job in (*same, wider):
        assert (await plan(world, job)).status == "done"
    assert built.read_text() == "4\n4\n"


@in_world()
async def test_a_job_that_is_cancelled_before_it_ran_is_not_planned_until_it_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody builds models of jobs that will not run."""
    built = count_builds(world, monkeypatch)
    job = await world.submit(ranks=4, model=USERS)
    await world.act(Action.CANCEL, job)
    await world.look(2)
    assert ((await plan(world, job)).status, built.read_text()) == (None, "")
    await world.act(Action.RESUME, job)
    await world.look(2)
    assert ((await plan(world, job)).status, built.read_text()) == ("done", "4\n")


@in_world()
async def test_a_job_that_goes_on_with_other_ranks_is_planned_for_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's model and ours; with the same ranks at another stage the plan is kept, for it has every stage."""
    built = count_builds(world, monkeypatch)
    for model in (USERS, {"kind": "mlp", "hidden": [8]}):
        job = await world.submit(model=model)
        await world.pause_after(job, 10)
        assert (await plan(world, job)).status == "done"
        for ranks, stage, known in ((2, 3, True), (3, 2, False)):
            request = ResumeRequest.model_validate({"ranks": ranks, "zero": {"stage": stage}})

            async def resume(tx: Tx, job: str = job, request: ResumeRequest = request) -> None:
                record = await jobs.lock(tx, job)
                assert record is not None
                await actions.resume(tx, record, ADA, request, 64)

            await world.database.transact(resume)
            assert ((await plan(world, job)).predicted is not None) == known
            await world.until_status(job, Status.RUNNING)
            found = await plan(world, job)
            assert found.predicted is not None and (found.predicted.ranks, found.stage) == (ranks, stage)
            await world.act(Action.PAUSE, job)
            await world.until_status(job, Status.PAUSED)
    assert built.read_text() == "2\n3\n"
