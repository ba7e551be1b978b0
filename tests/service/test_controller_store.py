"""The store under the controller: reading back, fallback, removals killed anywhere, orphans, a new database."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from server import orphans
from server.db import Database
from server.ids import new_id
from server.migrations import upgrade
from server.rows import checkpoint_views, checkpoints, jobs, new_jobs, readings, series
from server.rows.checkpoint_views import CheckpointQuery
from server.states import Action, Status
from server.views import CheckpointView
from server.whole_store import MARK_FILE
from tests.counted_calls import CountedCalls
from tests.service.controller_world import ADA, BOTH, Fault, World, in_world
from tests.service.reports_by_hand import checkpoint
from workers.contract import CheckpointRecord
from zero_engine.catalog import delete, list_checkpoints, verify
from zero_engine.store import LocalStore, StoreAway

BRISK = {"scrub_bytes_per_second": 2**40}


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


class DiesAt(CountedCalls):
    """The server dies before its nth change of the disk."""

    def die(self) -> None:
        raise Killed


async def _views(world: World, job: str) -> dict[int, CheckpointView]:
    """By step, removed ones too."""
    async with world.database.read() as connection:
        found = await checkpoint_views.page(connection, job, CheckpointQuery(shards=True, removed=True))
    return {each.step: each for each in found.items}


def _file(world: World, view: CheckpointView, rank: int = 0) -> Path:
    return world.folder / "checkpoints" / view.job_id / view.folder / view.shards[rank].file


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def _folders(world: World, job: str) -> set[str]:
    return {path.name for path in (world.folder / "checkpoints" / job).iterdir() if path.is_dir()}


async def _orphans(world: World) -> list[tuple[str, str]]:
    survey = await orphans.survey(world.database, world.settings)
    return [(item.kind, item.place) for item in survey.found]


# --- reading back


@in_world(databases=BOTH, **BRISK)
async def test_the_background_reads_every_checkpoint_back_and_marks_it(world: World) -> None:
    """Whole ones become verified with their time and an event; then retention lets go of what it kept for them."""
    job = await world.submit(steps=30)
    await world.until_status(job, Status.SUCCEEDED)
    await world.look(6, seconds=6.0)
    left = [view for view in (await _views(world, job)).values() if view.status != "deleted"]
    assert len(left) == 2
    assert all(view.status == "verified" and view.verified_at is not None for view in left)
    assert all(shard.verified_at is not None for view in left for shard in view.shards)
    assert "checkpoint.verified" in await world.actions(job)


@in_world()
async def test_a_store_that_is_not_mounted_for_a_while_spoils_no_checkpoint(world: World) -> None:
    """An empty folder stands where the store was: nothing is marked or written, a resume and a new job wait; all go on
    once it is back. What retention cannot remove meanwhile is said once.
    """
    job = await world.submit(steps=60)
    await world.pause_after(job, 25)
    root = Path(world.settings.store)
    elsewhere = root.rename(root.with_name("elsewhere"))
    root.mkdir()
    world.restart(**BRISK)
    await world.look(4, seconds=6.0)
    usable = [view for view in (await _views(world, job)).values() if view.status != "deleted"]
    assert {view.status for view in usable} == {"complete"}
    assert all(shard.status == "ok" for view in usable for shard in view.shards)
    assert await world.act(Action.RESUME, job)
    await world.look(3)
    waiting = await world.job(job)
    assert (waiting.status, waiting.reason) == (Status.QUEUED, "backoff"), waiting
    assert "is it mounted?" in str(waiting.reason_data)
    fresh = await world.submit("fresh")
    await world.look(3)
    assert "is it mounted?" in str((await world.job(fresh)).reason_data) and not list(root.iterdir())
    spare = usable[0] if not usable[0].pinned else usable[1]
    async with world.database.write() as tx:
        await checkpoints.set_status(tx, spare.id, "deleted", problem=checkpoints.REMOVING)
    for _ in range(3):
        await world.controller._storekeeper.retain()
    root.rmdir()
    elsewhere.rename(root)
    for each in (job, fresh):
        await world.until_status(each, Status.SUCCEEDED, seconds=1.0)
    said = [name for name in await world.actions(job) if name.startswith("retention.")]
    assert said == ["retention.stuck", "retention.resumed"]
    await world.look(4, seconds=61.0)
    assert {view.status for view in (await _views(world, job)).values()} - {"deleted"} == {"verified"}


@in_world()
async def test_a_store_without_its_mark_is_taken_again_when_a_person_says_so(world: World) -> None:
    """Emptied on purpose, or another one: a new job waits, its reason says how to go on, and that works."""
    await world.until_status(await world.submit(), Status.SUCCEEDED)
    root = Path(world.settings.store)
    mark = (root / MARK_FILE).read_text()
    for found, why in ((None, "make an empty file"), ("of another\n", "empty the file")):
        shutil.rmtree(root)
        root.mkdir()
        if found is not None:
            (root / MARK_FILE).write_text(found)
        job = await world.submit(why, steps=2)
        await world.look(3)
        assert why in str((await world.job(job)).reason_data)
        (root / MARK_FILE).write_text("")
        await world.until_status(job, Status.SUCCEEDED, seconds=1.0)
        assert (root / MARK_FILE).read_text() == mark


@in_world()
async def test_checkpoints_deleted_by_hand_are_marked_and_passed_over(world: World) -> None:
    """The store is there, they are not: a resume begins at the one before and says why, or fails when none is left."""
    job = await world.submit(steps=60)
    await world.pause_after(job, 25)
    newest, before = await world.checkpoints(job)
    root = Path(world.settings.job_store(job))
    shutil.rmtree(root / newest.folder)
    assert await world.act(Action.RESUME, job)
    await world.until_status(job, Status.RUNNING)
    assert (await world.attempt(job)).resume_step == before.step
    (told,) = [event for event in await world.events(job) if event.action == "resume.fallback"]
    assert f"step {newest.step}: its files are gone" in told.message
    await world.act(Action.PAUSE, job)
    await world.until_status(job, Status.PAUSED)
    shutil.rmtree(root)
    assert await world.act(Action.RESUME, job)
    failed = await world.until_status(job, Status.FAILED)
    assert failed.reason == "checkpoint_unreadable" and "files are gone" in str(failed.reason_data)
    views = [view for view in (await _views(world, job)).values() if view.status != "deleted"]
    assert {(view.status, shard.status) for view in views for shard in view.shards} == {("corrupt", "missing")}


@in_world()
async def test_a_damaged_checkpoint_is_found_before_it_is_needed_and_the_resume_says_why(world: World) -> None:
    """One flipped bit: corrupt, the rank named, the pin moved; the next attempt begins at the one before it."""
    job = await world.submit(steps=60)
    await world.pause_after(job, 25)
    views = await _views(world, job)
    newest = max(views)
    _flip(_file(world, views[newest]))
    world.restart(**BRISK)
    await world.look(4, seconds=6.0)
    views = await _views(world, job)
    assert (views[newest].status, views[newest].shards[0].status) == ("corrupt", "corrupt")
    assert views[newest].shards[1].status == "ok" and not views[newest].pinned
    usable = max(step for step, view in views.items() if view.status == "verified")
    assert views[usable].pinned
    await world.act(Action.RESUME, job)
    await world.until_status(job, Status.SUCCEEDED)
    (told,) = [event for event in await world.events(job) if event.action == "resume.fallback"]
    assert told.data["step"] == usable and f"step {newest}" in told.message


@in_world()
async def test_a_reading_that_was_cut_short_goes_on_behind_the_shards_it_has_read(world: World) -> None:
    """The first shard is damaged after it was read: only a reading from the start would see it."""
    job = await world.submit(steps=10)
    await world.until_status(job, Status.SUCCEEDED)
    (view,) = (await _views(world, job)).values()
    async with world.database.write() as tx:
        ref = await checkpoints.find(tx.connection, view.id)
        assert ref is not None
        await readings.note_shard(tx, ref, 0, "ok")
    _flip(_file(world, view))
    world.restart(**BRISK)
    await world.look(2)
    assert (await _views(world, job))[10].status == "verified"
    world.clock.pass_seconds(8 * 86400)
    await world.look(2)
    assert (await _views(world, job))[10].status == "corrupt"


@in_world()
async def test_a_mark_does_not_bring_back_what_retention_took_meanwhile(world: World) -> None:
    """The reading of a checkpoint that is being removed ends without a word."""
    job = await world.submit(steps=10)
    await world.until_status(job, Status.SUCCEEDED)
    (view,) = (await _views(world, job)).values()
    async with world.database.write() as tx:
        await checkpoints.set_status(tx, view.id, "deleted")
        assert not await readings.conclude(tx, view.id, readings.Reading(("missing",)), actor="controller")
    assert (await _views(world, job))[10].status == "deleted"


@in_world()
async def test_a_job_that_died_after_its_last_save_ends_without_another_step(world: World) -> None:
    """Resumed at its last step there is nothing to train: succeeded at exactly the steps asked for."""
    world.cluster.faults = [Fault("die", step=30)]
    job = await world.submit(steps=30)
    done = await world.until_status(job, Status.SUCCEEDED)
    attempt = await world.attempt(job)
    assert (done.attempt, done.step, attempt.resume_step) == (2, 30, 30)
    async with world.database.read() as connection:
        seen = await series.stats(connection, job)
    assert {(each.attempt, each.last_step) for each in seen if each.name == "loss"} == {(1, 30)}


# --- retention


@in_world()
async def test_a_removal_killed_at_any_change_of_the_disk_is_finished_by_the_next_server(world: World) -> None:
    """Every boundary, each from the same state: what is listed verifies, and the next look finishes it."""
    job = await world.submit(steps=30, checkpoint={"every": 10, "keep_latest": 3})
    await world.until_status(job, Status.SUCCEEDED)
    oldest = (await world.checkpoints(job))[-1]
    root = world.folder / "checkpoints" / job
    shutil.copytree(root / oldest.folder, world.folder / "whole")
    store, keeper, allowed = LocalStore(root), world.controller._storekeeper, 0
    finished = False
    while not finished:
        shutil.copytree(world.folder / "whole", root / oldest.folder, dirs_exist_ok=True)
        async with world.database.write() as tx:
            await checkpoints.set_status(tx, oldest.id, "deleted", problem=checkpoints.REMOVING)
        dying = DiesAt(allowed)
        keeper._open_store = lambda url, dying=dying: LocalStore(url, dying)  # type: ignore[misc]
        try:
            await keeper.retain()
            finished = True
        except Killed:
            assert all(verify(store, name.folder).ok for name in list_checkpoints(store))
            assert await _orphans(world) == []  # the next look is about to remove it
        keeper._open_store = LocalStore
        await keeper.retain()
        assert {name.step for name in list_checkpoints(store)} == {20, 30}
        assert _folders(world, job) == {name.folder for name in list_checkpoints(store)}
        allowed += 1
    assert allowed > 12
    assert await _orphans(world) == []


@in_world()
async def test_a_paused_job_keeps_what_it_needs_under_the_hardest_retention(world: World) -> None:
    """The pin holds whatever newer checkpoints there are."""
    job = await world.submit(steps=60)
    await world.pause_after(job, 15)
    pinned = next(c for c in await world.checkpoints(job) if c.pinned)
    async with world.database.write() as tx:  # newer ones that a later attempt might have left
        for step in (40, 50, 60):
            await checkpoints.record(tx, job, 9, CheckpointRecord.model_validate(checkpoint(step, fence=9)))
    world.restart()
    await world.look(3)
    assert pinned.id in {c.id for c in await world.checkpoints(job)}
    assert pinned.folder in _folders(world, job)


# --- what nothing refers to


@in_world()
async def test_what_nothing_refers_to_is_found_by_kind_and_left_alone(world: World) -> None:
    """A job that no row knows, an unfinished save, stray files in a job and beside all, a row without files."""
    job = await world.submit(steps=30)
    await world.until_status(job, Status.SUCCEEDED)
    await world.look(2)
    assert await _orphans(world) == []
    root = world.folder / "checkpoints"
    (root / job / "notes.txt").write_text("mine")
    (root / "list.txt").write_text("mine")
    Path(os.fsdecode(bytes(root) + b"/\xff")).write_text("a name that is no text")
    unfinished = root / job / "step-0000000099-attempt-000001"
    unfinished.mkdir()
    (unfinished / "rank-00000.safetensors").write_bytes(b"x" * 10)
    (root / "elsewhere" / "deep").mkdir(parents=True)
    (root / "elsewhere" / "deep" / "file").write_bytes(b"y")
    gone = (await world.checkpoints(job))[0]
    for path in (root / job / gone.folder).iterdir():
        path.unlink()
    found = await _orphans(world)
    assert sorted(found) == [
        ("file", "\\udcff"),
        ("file", "list.txt"),
        ("file", "notes.txt"),
        ("job", ""),
        ("missing", gone.folder),
        ("save", unfinished.name),
    ]
    assert (root / job / "notes.txt").exists() and unfinished.exists()
    root.rename(world.folder / "not-mounted")
    with pytest.raises(StoreAway, match="mounted"):
        await _orphans(world)


@in_world()
async def test_what_is_removed_and_saved_during_a_look_is_no_orphan(world: World) -> None:
    """Between the rows that it read and the files that it lists a checkpoint goes and another comes."""
    job = await world.submit(steps=30)
    await world.until_status(job, Status.SUCCEEDED)
    await world.look(2)
    loop, [newest, oldest, *_] = asyncio.get_running_loop(), await world.checkpoints(job)
    root = world.folder / "checkpoints" / job
    fresh = newest.folder.replace("attempt-000001", "attempt-000002")

    async def change() -> None:
        shutil.copytree(root / newest.folder, root / fresh)
        delete(LocalStore(root), oldest.folder)
        record = {**checkpoint(newest.step, fence=2), "folder": fresh}
        async with world.database.write() as tx:
            await checkpoints.set_status(tx, oldest.id, "deleted")
            await checkpoints.record(tx, job, 2, CheckpointRecord.model_validate(record))

    class Busy(LocalStore):
        """It changes when it is first listed."""

        def folders(self) -> Iterator[str]:
            if not (root / fresh).exists():
                asyncio.run_coroutine_threadsafe(change(), loop).result()
            return super().folders()

    assert (await orphans.survey(world.database, world.settings, Busy)).found == []
    assert {newest.folder, fresh} == _folders(world, job)


@in_world()
async def test_what_an_attempt_left_unfinished_is_removed_with_its_release(world: World) -> None:
    """A save that a kill cut short is no orphan afterwards."""
    job = await world.submit(steps=10_000)
    await world.until_step(job, 12)
    left = world.folder / "checkpoints" / job / "step-0000000012-attempt-000001"
    left.mkdir()
    (left / ".tmp-rank-00000.safetensors-aa").write_bytes(b"half")
    await world.act(Action.KILL, job)
    await world.until_status(job, Status.CANCELLED)
    await world.look(2)
    assert not left.exists()
    assert await _orphans(world) == []


# --- a database that is new


@in_world()
async def test_a_new_database_finds_jobs_and_checkpoints_in_the_store_and_resumes(world: World) -> None:
    """The server is installed again over the same store: the job rests, its index is there, its fence goes on; a fork
    that has saved nothing yet begins where it was forked.
    """
    job = await world.submit("日本語", steps=60)
    await world.until_step(job, 35)
    await world.act(Action.CANCEL, job)
    await world.until_status(job, Status.CANCELLED)
    before = await world.checkpoints(job)
    fork = await _forked(world, before[-1])
    await world.until_status(fork, Status.RUNNING)
    await world.act(Action.KILL, fork)
    await world.until_status(fork, Status.CANCELLED)
    assert not await world.checkpoints(fork)
    await _reinstall(world)
    await world.look(2)
    again = await world.job(job)
    assert (again.name, again.status, again.reason, again.attempt) == ("日本語", Status.CANCELLED, "recovered", 1)
    assert [(c.step, c.folder) for c in await world.checkpoints(job)] == [(c.step, c.folder) for c in before]
    recovered = await world.job(fork)
    assert recovered.step == before[-1].step and recovered.forked_from in {c.id for c in await world.checkpoints(job)}
    assert await world.act(Action.RESUME, fork)
    await world.until_status(fork, Status.SUCCEEDED)
    assert (await world.attempt(fork)).resume_step == before[-1].step
    assert await world.act(Action.RESUME, job)
    done = await world.until_status(job, Status.SUCCEEDED)
    attempt = await world.attempt(job)
    assert (done.attempt, attempt.resume_step) == (2, before[0].step)


async def _reinstall(world: World) -> None:
    await world.database.close()
    url = f"sqlite:///{world.folder / 'new.db'}"
    await asyncio.to_thread(upgrade, url)
    world.database = Database.open(url, clock=world.clock)
    world.restart()


@in_world(databases=BOTH)
async def test_a_fork_holds_its_origin_until_it_has_two_of_its_own(world: World) -> None:
    """Retention of the parent goes on around it, and takes it when the fork has saved twice."""
    job = await world.submit(steps=60, checkpoint={"every": 10, "keep_latest": 2})
    await world.until_step(job, 25)
    origin = (await world.checkpoints(job))[0]
    fork = await _forked(world, origin)
    async with world.database.write() as tx:  # it waits: the parent goes on alone
        await jobs.transition(tx, fork, Status.PAUSED, actor="controller", reason="paused_by_user")
    await world.until_status(job, Status.SUCCEEDED)
    await world.look(3)
    assert origin.id in {c.id for c in await world.checkpoints(job)} and len(_folders(world, job)) == 3
    assert await world.act(Action.RESUME, fork)
    await world.until_status(fork, Status.SUCCEEDED)
    assert (await world.attempt(fork)).resume_step == origin.step
    await world.look(3)
    assert len(_folders(world, job)) == 2 and origin.folder not in _folders(world, job)


async def _forked(world: World, origin: checkpoints.CheckpointRef) -> str:
    parent = await world.job(origin.job_id)
    fork = new_id()
    async with world.database.write() as tx:
        new = new_jobs.NewJob(
            fork, ADA.name, parent.job_spec(), "", None, None, parent.id, new_jobs.Fork(origin.id, origin.step)
        )
        await new_jobs.create(tx, new)
    return fork
