"""The controller with simulated ranks: submit, stop, fail, restart; on every database."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, func, select, update

from server import lifespan
from server.controller import applying
from server.controller.actions import Start
from server.controller.cluster import LaunchFailed, NoCapacity
from server.models import Attempt, Job, PointTail, ReportSeq, Series
from server.rows import attempts, checkpoints, jobs, series
from server.states import Action, AttemptStatus, Desired, Status
from tests.service.controller_world import BOTH, Fault, World, in_world
from tests.service.counted_statements import counted_statements
from tests.service.reports_by_hand import checkpoint
from workers.contract import SPOOL_FILE, AttemptId, CheckpointRecord, EventRecord, JobId
from workers.spool_sender import JOURNAL_FILE


@in_world(databases=BOTH)
async def test_a_job_runs_to_its_last_step_and_leaves_nothing(world: World) -> None:
    """Every transition has its event, the checkpoints are there, all slots are free again."""
    job = await world.submit(steps=25)
    done = await world.until_status(job, Status.SUCCEEDED)
    assert (done.reason, done.step) == ("finished", 25)
    names = await world.actions(job)
    told = [n for n in names if n.startswith("job.")]
    assert told == ["job.submitted", "job.starting", "job.running", "job.succeeded"]
    assert [c.step for c in await world.checkpoints(job)] == [25, 20]
    assert world.free_slots() == 4
    assert (await world.attempt(job)).status is AttemptStatus.RELEASED


@in_world()
async def test_the_spools_of_an_attempt_go_when_all_of_it_was_applied(world: World) -> None:
    """And not before: what was not acknowledged may still be read by hand."""
    job = await world.submit(steps=400)
    await world.until_step(job, 2)
    folder = world.settings.ranks_dir / (await world.attempt(job)).id
    (folder / "0").mkdir(parents=True)
    world.server_away = True
    await world.act(Action.KILL, job)
    await world.until_status(job, Status.CANCELLED)
    assert folder.exists()
    world.server_away = False
    job = await world.submit(steps=400)
    await world.until_step(job, 2)
    folder = world.settings.ranks_dir / (await world.attempt(job)).id
    (folder / "0").mkdir(parents=True)
    await world.act(Action.CANCEL, job)
    await world.until_status(job, Status.CANCELLED)
    assert not folder.exists()


@in_world()
async def test_a_rank_out_of_memory_fails_with_its_peak_beside_the_plan(world: World) -> None:
    """Not tried again: the same would happen."""
    world.cluster.faults = [Fault("raise", rank=1, step=3, code="out_of_memory")]
    job = await world.submit()
    await world.until_status(job, Status.RUNNING)
    async with world.database.write() as tx:
        values = {"plan_memory": [{"params": 1}, {"params": 100, "grads": 50}]}
        await attempts.set_values(tx, (await world.attempt(job)).id, **values)
    failed = await world.until_status(job, Status.FAILED)
    assert failed.reason_data is not None
    assert (failed.reason, failed.reason_data["planned_bytes"], failed.attempt) == ("out_of_memory", 150, 1)


@in_world(slots=2)
async def test_slots_return_to_exactly_all_after_many_jobs_in_a_row(world: World) -> None:
    """Finished jobs no longer count."""
    for number in range(10):
        await world.submit(f"j{number}", steps=2)

    async def all_done() -> bool:
        return world.cluster.num_launches == 10 and world.free_slots() == 2

    await world.until(all_done)


@in_world(slots=2)
async def test_of_two_gangs_that_do_not_fit_together_one_waits_with_nothing_held(world: World) -> None:
    """Strictly one after the other."""
    first, second = await world.submit("first"), await world.submit("second")
    await world.until_status(first, Status.RUNNING)
    waiting = await world.job(second)
    assert (waiting.status, waiting.reason) == (Status.QUEUED, "waiting_for_slots")
    assert len(world.cluster.attempts) == 1
    await world.until_status(second, Status.SUCCEEDED)
    assert (await world.job(first)).status is Status.SUCCEEDED


@in_world(slots=6)
async def test_a_look_asks_no_more_about_many_jobs_than_about_one(world: World) -> None:
    """Running and waiting jobs of which nothing is new: as many statements for six and six as for one and one.

    Six looks, signs of life written among them; each job has more checkpoints than must be kept and keeps them all.
    """
    counts = []
    for more in (1, 5):
        keep = {"every": 0, "keep_latest": 9}
        started = [await world.submit(f"{more} {n}", 1, 10**6, checkpoint=keep) for n in range(more)]
        for _ in range(more):
            await world.submit("waits", ranks=6, priority=0)
        for job in started:
            await world.until_status(job, Status.RUNNING)
        async with world.database.write() as tx:
            for job, step in product(started, (1, 2, 3)):
                await checkpoints.record(tx, job, 1, CheckpointRecord.model_validate(checkpoint(step)))
        await world.look(2)
        world.clock.pass_seconds(10.0)
        await world.controller.tick()
        with counted_statements(world.database) as statements:
            for _ in range(6):
                world.clock.pass_seconds(1.0)
                await world.controller.tick()
                await world.controller.settle()
        counts.append(len(statements))
    assert counts[0] == counts[1] < 6 * 25, counts


# --- stop -------------------------------------------------------------------------------------------------------------


@in_world()
async def test_a_cancel_saves_releases_and_only_then_says_cancelled(world: World) -> None:
    """`stopping` at once; `cancelled` when the cluster no longer has the attempt."""
    job = await world.submit(steps=500)
    await world.until_step(job, 13)
    assert await world.act(Action.CANCEL, job)
    assert (await world.job(job)).status is Status.STOPPING
    while (await world.job(job)).status is Status.STOPPING:
        await world.look()
    assert (await world.job(job)).status is Status.CANCELLED
    assert world.cluster.attempts == ()
    newest = (await world.checkpoints(job))[0]
    assert newest.step == (await world.job(job)).step
    assert not newest.pinned


@in_world(start_deadline_seconds=30.0)
async def test_a_rank_deaf_to_the_stop_is_killed_when_the_grace_is_over(world: World) -> None:
    """And the reason says that it was."""
    world.cluster.faults = [Fault("deaf", rank=1)]
    job = await world.submit(steps=10_000, stop_grace_seconds=5.0)
    await world.until_step(job, 3)
    await world.act(Action.CANCEL, job)
    begun = world.clock()
    ended = await world.until_status(job, Status.CANCELLED)
    assert ended.reason == "grace_expired"
    assert 5.0 <= (world.clock() - begun).total_seconds() < 8.0


@in_world()
async def test_a_kill_during_the_grace_acts_at_once(world: World) -> None:
    """It does not wait for the grace of the cancel before it."""
    world.cluster.faults = [Fault("deaf")]
    job = await world.submit(steps=10_000, stop_grace_seconds=3600.0)
    await world.until_step(job, 3)
    await world.act(Action.CANCEL, job)
    await world.look(3)
    await world.act(Action.KILL, job)
    begun = world.clock()
    ended = await world.until_status(job, Status.CANCELLED)
    assert ended.reason == "killed"
    assert (world.clock() - begun).total_seconds() < 3.0


@in_world()
async def test_a_cancel_while_starting_ends_within_moments(world: World) -> None:
    """Whatever the ranks are doing: there is nothing to save, so nothing to wait for."""
    for phase in ("started", "joining", "building"):
        world.cluster.faults = [Fault("hang", rank=1, phase=phase)]
        job = await world.submit(phase, stop_grace_seconds=3600.0)
        await world.look(8)
        assert (await world.job(job)).status is Status.STARTING
        await world.act(Action.CANCEL, job)
        begun = world.clock()
        await world.until_status(job, Status.CANCELLED)
        assert (world.clock() - begun).total_seconds() < 3.0
        assert world.free_slots() == 4


@in_world(slots=1)
async def test_many_waiting_jobs_are_cancelled_without_a_call_to_the_cluster(world: World) -> None:
    """Also when the cluster is full or away: they end where they are."""
    ids = [await world.submit(f"j{n}") for n in range(20)]
    world.cluster.down = True
    for job in ids:
        assert await world.act(Action.CANCEL, job)
        assert (await world.job(job)).status is Status.CANCELLED


@in_world()
async def test_a_cancel_that_nobody_looked_at_is_honoured_by_the_next_controller(world: World) -> None:
    """What is wanted is stored first."""
    job = await world.submit(steps=500)
    await world.until_step(job, 3)
    await world.act(Action.CANCEL, job)
    world.restart()
    assert (await world.until_status(job, Status.CANCELLED)).reason == "cancelled_by_user"


@in_world()
async def test_a_late_word_of_training_does_not_overwrite_a_cancel(world: World) -> None:
    """The report is applied, the status stays."""
    job = await world.submit(steps=500)
    world.server_away = True
    await world.look(3)
    assert (await world.job(job)).status is Status.STARTING
    await world.act(Action.CANCEL, job)
    for _ in range(5):
        await asyncio.to_thread(world.cluster.advance)
    world.server_away = False
    await asyncio.to_thread(world.cluster.advance)
    assert (await world.job(job)).status is Status.STOPPING
    await world.until_status(job, Status.CANCELLED)
    assert "job.running" not in await world.actions(job)


@in_world(databases=BOTH)
async def test_a_pause_pins_its_checkpoint_and_a_resume_goes_on_from_it(world: World) -> None:
    """A new attempt from the very step; no step is trained twice; the pin goes when the job trains again."""
    job = await world.submit(steps=60)
    await world.until_step(job, 17)
    await world.act(Action.PAUSE, job)
    paused = await world.until_status(job, Status.PAUSED)
    newest = (await world.checkpoints(job))[0]
    assert newest.pinned and newest.step == paused.step
    assert await world.act(Action.RESUME, job)
    await world.until_status(job, Status.RUNNING)
    attempt = await world.attempt(job)
    assert (attempt.number, attempt.resume_step) == (2, paused.step)
    await world.until_status(job, Status.SUCCEEDED)
    steps = [
        record.step
        for batch in world.batches
        for record in batch.records
        if record.kind == "points" and batch.rank == 0
    ]
    assert sorted(steps) == list(range(1, 61))


# --- failure ----------------------------------------------------------------------------------------------------------


@in_world()
async def test_a_rank_that_dies_is_retried_from_the_last_checkpoint(world: World) -> None:
    """Infrastructure: counted once, however many ranks went down with it."""
    world.cluster.faults = [Fault("die", rank=1, step=14)]
    job = await world.submit(steps=40)
    done = await world.until_status(job, Status.SUCCEEDED)
    assert (done.attempt, done.infrastructure_failures, done.user_failures) == (2, 1, 0)
    assert (await world.attempt(job)).resume_step == 10
    assert "retrying" in [e.data.get("reason") for e in await world.events(job)]


@in_world()
async def test_an_exception_fails_the_job_with_the_first_failing_ranks_traceback(world: World) -> None:
    """Rank 0 only lost its peer."""
    world.cluster.faults = [Fault("raise", rank=1, step=5)]
    job = await world.submit()
    failed = await world.until_status(job, Status.FAILED)
    assert failed.reason == "user_error"
    assert failed.reason_data is not None and failed.reason_data["rank"] == 1
    assert world.free_slots() == 4


@in_world()
async def test_a_vanished_actor_is_a_lost_rank_and_retried(world: World) -> None:
    """The rest is killed, not left waiting in its exchange."""
    world.cluster.faults = [Fault("lose", rank=0, step=12)]
    job = await world.submit(steps=30)
    done = await world.until_status(job, Status.SUCCEEDED)
    assert done.attempt == 2
    assert "rank_lost" in [e.data.get("reason") for e in await world.events(job)]


@in_world()
async def test_the_restart_limit_is_exact(world: World) -> None:
    """Two allowed, endless failure: three attempts in all."""
    job = await world.submit(restart={"infrastructure_failures": 2}, checkpoint={"every": 0})
    for _ in range(3):
        world.cluster.faults = [Fault("die", rank=0, step=1)]
        await world.until_status(job, Status.RUNNING, Status.FAILED)
        await world.until_status(job, Status.QUEUED, Status.FAILED)
    assert ((await world.job(job)).status, (await world.job(job)).attempt) == (Status.FAILED, 3)


@in_world(start_deadline_seconds=20.0)
async def test_a_rank_that_never_joins_is_named_when_the_start_deadline_is_over(world: World) -> None:
    """Not thirty minutes of silence."""
    world.cluster.faults = [Fault("hang", rank=1, phase="started")]
    job = await world.submit(restart={"infrastructure_failures": 0})
    failed = await world.until_status(job, Status.FAILED, seconds=1.0)
    assert failed.reason == "start_deadline"
    assert failed.reason_data is not None
    assert (failed.reason_data["rank"], failed.reason_data["node"]) == (1, "node")


@in_world(no_progress_seconds=60.0)
async def test_a_hung_rank_is_named_and_the_group_killed(world: World) -> None:
    """Everybody waits in an exchange; the step counter stands still."""
    world.cluster.faults = [Fault("hang", rank=1, step=7)]
    job = await world.submit(restart={"infrastructure_failures": 0})
    failed = await world.until_status(job, Status.FAILED, seconds=2.0)
    assert failed.reason == "no_progress"
    assert world.free_slots() == 4


@in_world()
async def test_a_launch_that_fails_for_good_ends_with_its_own_reason(world: World) -> None:
    """It counts as infrastructure and backs off; it is not tried for ever."""
    job = await world.submit(restart={"infrastructure_failures": 1})
    for _ in range(2):
        world.cluster.refuse_next = LaunchFailed("no interpreter there")
        while world.cluster.refuse_next is not None:
            await world.look()
    failed = await world.until_status(job, Status.FAILED)
    assert failed.reason == "launch_failed"
    assert failed.reason_data is not None and "no interpreter" in str(failed.reason_data["message"])


@in_world()
async def test_slots_that_were_gone_at_the_launch_cost_nothing(world: World) -> None:
    """NoCapacity: back in the queue, nothing counted."""
    world.cluster.refuse_next = NoCapacity("taken")
    job = await world.submit()
    done = await world.until_status(job, Status.SUCCEEDED)
    assert (done.attempt, done.infrastructure_failures) == (2, 0)


@in_world()
async def test_damaged_checkpoints_never_start_a_job_over_silently(world: World) -> None:
    """All of them unreadable: failed with the reason, and the job can still be cloned."""
    job = await world.submit(steps=60)
    await world.pause_after(job, 15)
    await world.act(Action.RESUME, job)
    async with world.database.write() as tx:
        for each in await world.checkpoints(job):
            await checkpoints.set_status(tx, each.id, "corrupt", problem="test")
    failed = await world.until_status(job, Status.FAILED)
    assert (failed.reason, failed.attempt) == ("checkpoint_unreadable", 1)


@in_world()
async def test_an_attempt_that_fell_back_says_where_it_really_began(world: World) -> None:
    """The rank refused one checkpoint and read another: the first is marked, the attempt's start corrected."""
    job = await world.submit(steps=500)
    await world.until_step(job, 25)
    newest, before = await world.checkpoints(job)
    attempt = await world.attempt(job)
    said = [("checkpoint.refused", newest), ("checkpoint.fallback", before)]
    records = [
        EventRecord(
            at=world.clock(),
            action=action,
            message="scripted",
            data={"folder": c.folder, "step": c.step, "damaged": action == "checkpoint.refused"},
        )
        for action, c in said
    ]
    rank = (await world.gang(job)).ranks[1]
    rank.spool += records
    await world.look(2)
    now = await world.attempt(job)
    assert (now.id, now.resume_step, now.resume_checkpoint) == (attempt.id, before.step, before.id)
    assert {c.step: c.status for c in await world.checkpoints(job)}[newest.step] == "corrupt"


@in_world()
async def test_a_release_that_fails_is_tried_again_and_the_reason_stays_the_first(world: World) -> None:
    """Trouble while tidying up neither hides what happened nor stops the controller."""
    release, calls = world.cluster.release, []

    def stubborn(attempt_id: AttemptId) -> None:
        calls.append(attempt_id)
        if len(calls) < 3:
            raise RuntimeError("teardown trouble")
        release(attempt_id)

    world.cluster.release = stubborn  # type: ignore[method-assign]
    world.cluster.faults = [Fault("raise", step=3)]
    job = await world.submit()
    failed = await world.until_status(job, Status.FAILED)
    assert (failed.reason, len(calls)) == ("user_error", 3)


@in_world()
async def test_a_write_that_failed_is_made_up_for_at_the_next_look(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt is released on the cluster, the row not yet: no leak, no second release needed, no lost end."""
    usual, failures = jobs.transition, [1, 2]

    async def broken(tx: Any, job_id: str, new: Status, **facts: Any) -> Status | None:
        if new is Status.SUCCEEDED and failures:
            failures.pop()
            raise RuntimeError("the database is full")
        return await usual(tx, job_id, new, **facts)

    monkeypatch.setattr(jobs, "transition", broken)
    job = await world.submit(steps=3)
    await world.until_status(job, Status.SUCCEEDED)
    assert not failures
    assert world.free_slots() == 4


@in_world()
async def test_a_move_that_the_table_forbids_fails_the_job_with_a_reason_of_its_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of ours is shown as such; it never ends as success and never leaves a job live for ever."""
    usual = applying.finish

    def wrong(*given: Any) -> Any:
        return replace(usual(*given), status=Status.PAUSED)

    monkeypatch.setattr(applying, "finish", wrong)
    job = await world.submit(steps=3)
    failed = await world.until_status(job, Status.FAILED)
    assert failed.reason == "requeue_failed"
    assert world.free_slots() == 4


# --- restart and adoption ---------------------------------------------------------------------------------------------


@in_world(databases=BOTH)
async def test_a_restarted_server_adopts_what_trains_and_nothing_is_doubled_or_missing(world: World) -> None:
    """One launch in all; every step reported exactly once."""
    job = await world.submit(steps=60)
    await world.until_step(job, 12)
    world.server_away = True
    for _ in range(9):
        await asyncio.to_thread(world.cluster.advance)
    world.restart()
    world.server_away = False
    await world.until_status(job, Status.SUCCEEDED)
    assert world.cluster.num_launches == 1
    assert "attempt.adopted" in await world.actions(job)
    points = [r.step for b in world.batches for r in b.records if r.kind == "points"]
    assert points == list(range(1, 61))


@in_world()
async def test_lost_answers_to_reports_apply_nothing_twice(world: World) -> None:
    """The sender repeats the very batch; the series has each step once."""
    job = await world.submit(steps=20)
    world.drop_answers = 15
    await world.until_status(job, Status.SUCCEEDED)
    async with world.database.read() as connection:
        statement = (
            select(func.count(), func.count(PointTail.step.distinct()))
            .join(Series, Series.id == PointTail.series_id)
            .where(Series.name == "loss")
        )
        assert (await connection.execute(statement)).one() == (20, 20)


@in_world()
async def test_killed_between_the_row_and_the_cluster_the_job_still_runs_once(world: World) -> None:
    """The attempt was written down and never launched: released, and started again uncounted."""
    job = await world.submit(steps=10)
    assert await world.controller.leadership.acquire()
    assert await world.controller._applier._launcher.claim(Start(JobId(job), "cpu"), "url") is not None
    assert (await world.job(job)).status is Status.STARTING
    world.restart()
    done = await world.until_status(job, Status.SUCCEEDED)
    assert done.infrastructure_failures == 0
    assert world.free_slots() == 4


@in_world()
async def test_a_launch_whose_answer_was_lost_is_found_and_adopted_not_repeated(world: World) -> None:
    """Look before trying again."""
    world.cluster.lose_next_answer = True
    job = await world.submit(steps=10)
    await world.until_status(job, Status.SUCCEEDED)
    assert world.cluster.num_launches == 1


@in_world()
async def test_an_error_of_one_look_is_not_the_end_of_anything(world: World) -> None:
    """The cluster is away for a while: nothing is judged, and queued jobs say why they wait."""
    running, queued = await world.submit(steps=80), await world.submit(ranks=4)
    await world.until_step(running, 5)
    world.cluster.down = True
    await world.look(30, seconds=10.0)
    assert (await world.job(running)).status is Status.RUNNING
    assert (await world.job(queued)).reason == "cluster_unavailable"
    world.cluster.down = False
    await world.until_status(running, Status.SUCCEEDED)
    assert world.cluster.num_launches == 1


@in_world()
async def test_when_the_cluster_lost_everything_running_jobs_go_on_from_their_checkpoint(world: World) -> None:
    """History is in our database; the attempt is `node_lost`, the next one resumes."""
    job = await world.submit(steps=40)
    await world.until_step(job, 22)
    world.cluster.lose_everything()
    done = await world.until_status(job, Status.SUCCEEDED)
    assert (done.attempt, (await world.attempt(job)).resume_step) == (2, 20)
    assert "node_lost" in [e.data.get("reason") for e in await world.events(job)]


@in_world()
async def test_what_ranks_wrote_and_nobody_sent_is_taken_in_from_their_folders(world: World) -> None:
    """Head, actors and agent died together while the server was away: no step is missing, and none is counted twice."""
    job = await world.submit(steps=40)
    await world.until_step(job, 12)
    attempt, step = (await world.attempt(job)).id, (await world.job(job)).step
    world.cluster.lose_everything()
    async with world.database.read() as connection:
        query = select(ReportSeq.rank, ReportSeq.seq).where(ReportSeq.attempt_id == attempt)
        sent = {row.rank: row.seq for row in (await connection.execute(query)).all()}
    for rank, seq in sent.items():
        _leave_unsent(world.settings.ranks_dir / attempt / str(rank), seq, range(step + 1, step + 6))
    await world.until_status(job, Status.SUCCEEDED)
    async with world.database.read() as connection:
        stored = {s.attempt: s for s in await series.stats(connection, job) if (s.name, s.rank) == ("loss", 0)}
    assert (stored[1].count, stored[1].last_step, stored[1].out_of_order_count) == (step + 5, step + 5, 0)
    assert not (world.settings.ranks_dir / attempt).exists()


def _leave_unsent(folder: Path, seq: int, steps: range) -> None:
    """A rank's folder whose batches up to `seq` were applied, the last one's answer perhaps not heard."""
    folder.mkdir(parents=True)
    cuts = [{"seq": number, "spool": 0, "output": 0} for number in (seq - 1, seq)]
    (folder / JOURNAL_FILE).write_text("".join(json.dumps(cut) + "\n" for cut in cuts))
    at = "2026-11-29T12:00:09Z"
    lines = [json.dumps({"kind": "points", "at": at, "step": step, "values": {"loss": 1.0}}) for step in steps]
    (folder / SPOOL_FILE).write_text("\n".join(lines) + "\n")


@in_world()
async def test_checkpoints_that_no_report_told_of_are_found_in_the_store(world: World) -> None:
    """Saved while the server was away, then everything died: the resume starts from the file, not from the row."""
    job = await world.submit(steps=60)
    await world.until_step(job, 12)
    world.server_away = True
    for _ in range(14):
        await asyncio.to_thread(world.cluster.advance)
    world.cluster.lose_everything()
    world.server_away = False
    await world.until_status(job, Status.SUCCEEDED)
    assert (await world.attempt(job)).resume_step == 20
    assert "checkpoint.found" in await world.actions(job)


@in_world(sweep_seconds=30.0)
async def test_an_attempt_without_a_row_is_swept_after_a_while(world: World) -> None:
    """Its job was deleted by hand under it."""
    job = await world.submit(steps=10_000)
    await world.until_step(job, 2)
    async with world.database.write() as tx:
        await tx.execute(delete(Job).where(Job.id == job))
    await world.look(20, seconds=1.0)
    assert len(world.cluster.attempts) == 1
    await world.look(20, seconds=1.0)
    assert world.cluster.attempts == ()


@in_world(ray_address="somewhere:6379", sweep_seconds=5.0)
async def test_on_a_shared_cluster_strangers_are_left_alone_and_our_own_leftovers_are_not(world: World) -> None:
    """Two services on one Ray: neither ends the other's jobs; what we released and still exists is removed."""
    mine, strangers = await world.submit("mine", steps=10_000), await world.submit("theirs", steps=10_000)
    await world.until_step(mine, 2)
    await world.until_step(strangers, 2)
    ours, theirs = (await world.attempt(mine)).id, (await world.attempt(strangers)).id
    async with world.database.write() as tx:
        await tx.execute(delete(Job).where(Job.id == strangers))
        released = {"status": AttemptStatus.RELEASED, "reason": "killed"}
        await tx.execute(update(Attempt).where(Attempt.id == ours).values(**released))
        await tx.execute(update(Job).where(Job.id == mine).values(status=Status.CANCELLED))
    await world.look(30, seconds=1.0)
    assert world.cluster.attempts == (theirs,)


@in_world()
async def test_a_silent_rank_is_shown_unreachable_and_recovers(world: World) -> None:
    """Five minutes without a sign of life, while it trains: never killed for it."""
    world.cluster.faults = [Fault("silent", rank=1, step=2)]
    job = await world.submit(steps=5_000)
    await world.until_step(job, 3)
    await world.look(30, seconds=10.0)
    shown = await world.job(job)
    assert (shown.status, shown.reason) == (Status.RUNNING, "unreachable")
    (await world.gang(job)).hear()
    await world.look(2)
    assert (await world.job(job)).reason == "running"
    assert [n for n in await world.actions(job) if n == "job.unreachable"] == ["job.unreachable"]


@in_world(databases=BOTH)
async def test_two_controllers_never_both_act(world: World) -> None:
    """The second waits for the lease; the first, once it lost it, writes nothing."""
    first = world.controller
    world.restart()
    second = world.controller
    second.leadership._holder = "another"
    assert await first.tick()
    assert not await second.tick()
    world.clock.pass_seconds(11.0)
    assert await second.tick()
    assert not await first.tick()


@in_world()
async def test_a_released_attempt_is_never_rewritten(world: World) -> None:
    """Terminal rows stay as they are through restarts and late words."""
    job = await world.submit(steps=10)
    await world.until_status(job, Status.SUCCEEDED)
    before = await world.attempt(job)
    world.restart()
    await world.look(20)
    assert await world.attempt(job) == before
    assert (await world.job(job)).attempt == 1


# --- stopping and starting the server ---------------------------------------------------------------------------------


@in_world()
async def test_a_stopped_server_pauses_its_jobs_and_the_next_one_resumes_exactly_these(world: World) -> None:
    """What a person had paused stays paused."""
    running, mine = await world.submit("running", steps=400), await world.submit("mine", steps=400)
    await world.until_step(running, 3)
    await world.until_step(mine, 3)
    await world.act(Action.PAUSE, mine)
    waiting = await world.submit("waiting", ranks=4)
    await world.look(2)
    await world.controller.drain()
    await lifespan.pause_live(world.database, world.controller.leadership)
    assert (await world.until_status(running, Status.PAUSED)).reason == "server_stopped"
    await world.until_status(mine, Status.PAUSED)
    await world.look(5)
    assert (await world.job(waiting)).status is Status.QUEUED
    world.restart()
    await world.until_status(running, Status.RUNNING)
    assert (await world.job(running)).desired is Desired.RUN
    assert (await world.job(mine)).status is Status.PAUSED


async def stopped_during(world: World, part: str) -> tuple[str, list[str]]:
    """A job whose start stands in that part of the launcher as the server begins to stop; which jobs were told to."""
    job = await world.submit(steps=400)
    launcher, reached, going_on = world.controller._launcher, asyncio.Event(), asyncio.Event()
    method = getattr(launcher, part)

    async def late(*given: Any) -> Any:
        reached.set()
        await going_on.wait()
        return await method(*given)

    setattr(launcher, part, late)
    look = asyncio.create_task(world.controller.tick())
    await reached.wait()
    stopping = asyncio.create_task(world.controller.drain())
    await asyncio.wait([stopping], timeout=0.1)
    assert stopping.done() == (part == "_prepare"), "it waits for what is written, and for nothing else"
    going_on.set()
    await stopping
    told = await lifespan.pause_live(world.database, world.controller.leadership)
    await look
    await world.look(5)
    return job, [each.id for each in told]


@in_world()
async def test_a_start_that_was_planned_as_the_server_stops_is_not_made(world: World) -> None:
    """Ctrl-C before the attempt is written down: nothing begins to train behind the pause."""
    job, told = await stopped_during(world, "_prepare")
    assert told == [] and (await world.job(job)).status is Status.QUEUED


@in_world()
async def test_a_start_that_was_being_made_as_the_server_stops_is_paused_like_the_others(world: World) -> None:
    """Ctrl-C while the attempt is written down: the server waits until it is, and no longer."""
    job, told = await stopped_during(world, "_tell_fallback")
    assert told == [job]
    assert (await world.until_status(job, Status.PAUSED)).reason == "server_stopped"


@in_world()
async def test_a_server_killed_while_it_stops_its_jobs_still_resumes_them(world: World) -> None:
    """A second Ctrl-C: the pause goes through under the next server, and is taken back there."""
    job = await world.submit(steps=400)
    await world.until_step(job, 3)
    await lifespan.pause_live(world.database, world.controller.leadership)
    world.restart()
    await world.until_status(job, Status.RUNNING)
    assert (await world.attempt(job)).number == 2
    assert "job.paused" in await world.actions(job)


@in_world()
async def test_a_person_who_cancels_while_the_server_stops_wins(world: World) -> None:
    """Cancel is more severe than the pause of the server."""
    world.cluster.faults = [Fault("deaf")]
    job = await world.submit(steps=10_000, stop_grace_seconds=2.0)
    await world.until_step(job, 3)
    await lifespan.pause_live(world.database, world.controller.leadership)
    await world.act(Action.CANCEL, job)
    await world.until_status(job, Status.CANCELLED)


# --- deletion and retention -------------------------------------------------------------------------------------------


@in_world(databases=BOTH)
async def test_a_deleted_job_leaves_neither_rows_nor_files(world: World) -> None:
    """With several attempts and their checkpoints."""
    world.cluster.faults = [Fault("die", step=12)]
    job = await world.submit(steps=30)
    await world.until_status(job, Status.SUCCEEDED)
    store = world.folder / "checkpoints" / job
    assert store.exists()
    assert await world.act(Action.DELETE, job)
    for _ in range(5):
        await world.look()
    assert not store.exists()
    async with world.database.read() as connection:
        assert await jobs.get(connection, job) is None


@in_world()
async def test_a_deletion_that_fails_says_why_and_can_be_tried_again(world: World) -> None:
    """Something that cannot be removed is no orphan: the row stays."""
    job = await world.submit(steps=10)
    await world.until_status(job, Status.SUCCEEDED)
    keeper = world.controller._storekeeper
    usual = keeper._open_store

    def broken(url: str) -> object:
        raise PermissionError(f"{url} is read-only")

    keeper._open_store = broken  # type: ignore[assignment]
    await world.act(Action.DELETE, job)
    failed = await world.until_status(job, Status.DELETE_FAILED)
    assert failed.reason_data is not None and "read-only" in str(failed.reason_data["message"])
    keeper._open_store = usual
    assert await world.act(Action.DELETE, job)
    await world.look(3)
    async with world.database.read() as connection:
        assert await jobs.get(connection, job) is None


@in_world()
async def test_retention_keeps_what_the_spec_says_in_rows_and_files_alike(world: World) -> None:
    """keep_latest 3 of many; a late report of a removed one does not bring it back."""
    job = await world.submit(steps=100, checkpoint={"every": 10, "keep_latest": 3})
    await world.until_status(job, Status.SUCCEEDED)
    await world.look(2)
    assert [c.step for c in await world.checkpoints(job)] == [100, 90, 80]
    folders = sorted(p.name for p in (world.folder / "checkpoints" / job).iterdir() if p.is_dir())
    assert len(folders) == 3
