"""What every `Cluster` promises, as tests: subclass `ClusterConformance` and give it a `lab`.

A `Lab` makes launches for its cluster and lets time pass there; the fake advances, Ray waits.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest

from server.controller.cluster import AttemptState, Cluster, Launch, NoCapacity
from workers.contract import AttemptId, JobId, LaunchOrder, Rank, ReportBatch
from workers.spec import JobSpec


class Lab(Protocol):
    """A cluster with at least four free slots, and what is around it."""

    @property
    def cluster(self) -> Cluster: ...

    @property
    def received(self) -> list[ReportBatch]:
        """Batches that were applied, in order; the lab's server applies (attempt, rank, seq) once."""

    @property
    def report_url(self) -> str: ...

    @property
    def folder(self) -> Path:
        """For stores, rank folders and caches; short."""

    def until(self, condition: Callable[[], bool]) -> None:
        """Let time pass until it holds; fails the test when it does not within the lab's patience."""

    def server_away(self, away: bool) -> None:
        """Stop or resume answering reports."""


def new_launch(lab: Lab, *, ranks: int = 2, steps: int = 1000, fence: int = 1) -> Launch:
    """A small job that trains for about as long as it is let."""
    job, attempt = JobId(str(uuid.uuid4())), AttemptId(str(uuid.uuid4()))
    spec = JobSpec.model_validate(
        {
            "name": "conformance",
            "model": {"kind": "mlp", "hidden": [8]},
            "data": {"kind": "digits"},
            "train": {"steps": steps, "global_batch": 16, "micro_batch": 1, "eval": {"every": 0}},
            "resources": {"ranks": ranks, "device": "cpu"},
            "zero": {"stage": 0},
            "checkpoint": {"every": 0},
        }
    )
    orders = tuple(
        LaunchOrder(
            job_id=job,
            attempt_id=attempt,
            fence=fence,
            rank=Rank(rank),
            world_size=ranks,
            master_addr="",
            master_port=0,
            device="cpu",
            spec=spec,
            chunk=spec.chunk,
            rank_folder=str(lab.folder / "ranks" / attempt / str(rank)),
            cache_folder=str(lab.folder / "cache"),
            store_url=str(lab.folder / "store" / job),
        )
        for rank in range(ranks)
    )
    return Launch(job, attempt, fence, orders, lab.report_url, "a-token", orphan_seconds=3600.0)


class ClusterConformance:
    """The tests. `lab` must be a fixture of the subclass; each test releases what it launched."""

    def state(self, lab: Lab, attempt_id: AttemptId) -> AttemptState | None:
        found = [a for a in lab.cluster.observe().attempts if a.attempt_id == attempt_id]
        assert len(found) <= 1
        return found[0] if found else None

    def free_slots(self, lab: Lab) -> int:
        return sum(n.free_slots for n in lab.cluster.observe().nodes if n.alive)

    def start(self, lab: Lab, **facts: int) -> Launch:
        launch = new_launch(lab, **facts)
        lab.cluster.launch(launch)
        return launch

    def training(self, lab: Lab, launch: Launch) -> bool:
        state = self.state(lab, launch.attempt_id)
        return state is not None and all(r.step >= 1 for r in state.ranks)

    def ended(self, lab: Lab, launch: Launch) -> bool:
        state = self.state(lab, launch.attempt_id)
        return state is not None and all(r.result is not None and r.reports_closed for r in state.ranks)

    def test_a_launched_attempt_is_observed_with_every_rank_and_holds_its_slots(self, lab: Lab) -> None:
        """Found by name: job, attempt, fence and ranks are those of the launch."""
        before = self.free_slots(lab)
        launch = self.start(lab, fence=3)
        state = self.state(lab, launch.attempt_id)
        assert state is not None
        assert (state.job_id, state.fence) == (launch.job_id, 3)
        assert [r.rank for r in state.ranks] == [0, 1]
        assert self.free_slots(lab) == before - 2
        lab.until(lambda: self.training(lab, launch))
        lab.cluster.release(launch.attempt_id)
        lab.until(lambda: self.free_slots(lab) == before)

    def test_a_second_launch_of_the_same_attempt_changes_nothing(self, lab: Lab) -> None:
        """A controller that lost the answer may ask again: the same processes go on."""
        launch = self.start(lab)
        lab.until(lambda: self.training(lab, launch))
        first = self.state(lab, launch.attempt_id)
        lab.cluster.launch(launch)
        second = self.state(lab, launch.attempt_id)
        assert first is not None and second is not None
        assert [(r.pid, r.start_ticks) for r in second.ranks] == [(r.pid, r.start_ticks) for r in first.ranks]
        lab.cluster.release(launch.attempt_id)

    def test_a_gang_that_does_not_fit_starts_nothing(self, lab: Lab) -> None:
        """NoCapacity, and not one slot is held."""
        before = self.free_slots(lab)
        launch = new_launch(lab, ranks=before + 1)
        with pytest.raises(NoCapacity):
            lab.cluster.launch(launch)
        assert self.state(lab, launch.attempt_id) is None
        assert self.free_slots(lab) == before

    def test_a_job_that_reaches_its_last_step_finishes_and_its_reports_close(self, lab: Lab) -> None:
        """Every rank says `finished` with the same digest and step, and the last batch of each is marked closed."""
        launch = self.start(lab, steps=3)
        lab.until(lambda: self.ended(lab, launch))
        state = self.state(lab, launch.attempt_id)
        assert state is not None
        results = [r.result for r in state.ranks if r.result is not None]
        assert {r.outcome for r in results} == {"finished"}
        assert {r.step for r in results} == {3}
        assert len({r.digest for r in results}) == 1
        closed = {b.rank for b in lab.received if b.attempt_id == launch.attempt_id and b.closed}
        assert closed == {0, 1}
        lab.cluster.release(launch.attempt_id)

    def test_batches_arrive_numbered_without_gap_or_repeat(self, lab: Lab) -> None:
        """Per rank 1, 2, 3, ...; also when the server was away in between."""
        launch = self.start(lab)
        lab.until(lambda: self.training(lab, launch))
        lab.server_away(True)
        state = self.state(lab, launch.attempt_id)
        assert state is not None
        seen = state.ranks[0].step

        def further() -> bool:
            now = self.state(lab, launch.attempt_id)
            return now is not None and now.ranks[0].step > seen

        lab.until(further)
        lab.server_away(False)
        lab.cluster.request_stop(launch.attempt_id)
        lab.until(lambda: self.ended(lab, launch))
        for rank in (0, 1):
            numbers = [b.seq for b in lab.received if b.attempt_id == launch.attempt_id and b.rank == rank]
            assert numbers == list(range(1, len(numbers) + 1))
        lab.cluster.release(launch.attempt_id)

    def test_a_stop_lets_all_ranks_leave_after_the_same_step(self, lab: Lab) -> None:
        """Outcome `stopped`, one step for all, a checkpoint of it reported."""
        launch = self.start(lab)
        lab.until(lambda: self.training(lab, launch))
        lab.cluster.request_stop(launch.attempt_id)
        lab.cluster.request_stop(launch.attempt_id)
        lab.until(lambda: self.ended(lab, launch))
        state = self.state(lab, launch.attempt_id)
        assert state is not None
        results = [r.result for r in state.ranks if r.result is not None]
        assert {r.outcome for r in results} == {"stopped"}
        (step,) = {r.step for r in results}
        mine = [b for b in lab.received if b.attempt_id == launch.attempt_id]
        saved = [r.step for b in mine for r in b.records if r.kind == "checkpoint"]
        assert saved == [step]
        lab.cluster.release(launch.attempt_id)

    def test_a_kill_ends_every_rank_and_what_they_had_said_is_still_sent(self, lab: Lab) -> None:
        """Outcome `died` by SIGKILL; the points before it arrive."""
        launch = self.start(lab)
        lab.until(lambda: self.training(lab, launch))
        lab.cluster.kill(launch.attempt_id)
        lab.until(lambda: self.ended(lab, launch))
        state = self.state(lab, launch.attempt_id)
        assert state is not None
        assert {(r.result.outcome, r.result.signal) for r in state.ranks if r.result} == {("died", 9)}
        mine = [b for b in lab.received if b.attempt_id == launch.attempt_id and b.rank == 0]
        assert any(r.kind == "points" for b in mine for r in b.records)
        lab.cluster.release(launch.attempt_id)

    def test_a_release_removes_whatever_is_left_and_may_come_twice(self, lab: Lab) -> None:
        """Also of a training attempt, and of one that never was."""
        before = self.free_slots(lab)
        launch = self.start(lab)
        lab.until(lambda: self.training(lab, launch))
        lab.cluster.release(launch.attempt_id)
        assert self.state(lab, launch.attempt_id) is None
        lab.cluster.release(launch.attempt_id)
        lab.cluster.release(AttemptId(str(uuid.uuid4())))
        lab.until(lambda: self.free_slots(lab) == before)

    def test_commands_for_an_attempt_that_is_gone_do_nothing(self, lab: Lab) -> None:
        """A late stop, kill or adopt is no error."""
        gone = AttemptId(str(uuid.uuid4()))
        lab.cluster.request_stop(gone)
        lab.cluster.kill(gone)
        lab.cluster.adopt(gone, lab.report_url)
        assert self.state(lab, gone) is None
