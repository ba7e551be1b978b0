"""What to do about one living attempt: watch its start, stop it, find the culprit, let it go. Pure.

The life of an attempt: launched, every rank joined, training, an end that is decided once (`Decide` writes the reason),
the kill where something still lives, the drain of the last reports, the release. The job moves only with the release.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from server.controller.actions import Adopt, Command, Data, Decide, Finish, Kill, MarkRunning, MarkStopping, Stop
from server.controller.cluster import RankState
from server.controller.outcome import Outcome, outcome_of
from server.controller.retry import after_failure, retry_class
from server.controller.snapshot import AttemptFacts, JobFacts, Policy, RankFacts, Snapshot
from server.reasons import REASONS, sentence
from server.states import STOP_REASONS, AttemptStatus, Desired, Status, is_legal
from workers.contract import ResultRecord

_JOINED = frozenset({"building", "restoring", "training", "saving", "finished"})
_TRAINING = frozenset({"training", "saving", "finished"})


@dataclass(frozen=True)
class RankView:
    """One rank, reported and observed side by side."""

    rank: int
    facts: RankFacts
    state: RankState | None  # None: the cluster does not list it

    @property
    def result(self) -> ResultRecord | None:
        """How it ended, from whoever knows."""
        return self.facts.result or (self.state.result if self.state else None)

    @property
    def gone(self) -> bool:
        """No process of it is left as far as is known."""
        return self.result is not None or self.state is None or self.state.status in ("exited", "lost")

    @property
    def lost(self) -> bool:
        """Its actor is gone and nothing says how it ended."""
        return self.result is None and self.state is not None and self.state.status == "lost"

    @property
    def drained(self) -> bool:
        """Nothing more will be heard of it."""
        return self.facts.closed or self.state is None or self.state.reports_closed

    @property
    def step(self) -> int:
        """Last completed step that anybody knows of."""
        return max(self.facts.step, self.state.step if self.state else 0)

    @property
    def training(self) -> bool:
        """It has something worth a checkpoint."""
        return self.facts.phase in _TRAINING or self.step > 0

    @property
    def silent_seconds(self) -> float:
        """Since its last sign of life; a rank that only waits for its peers gives some."""
        return self.state.heartbeat_age_seconds if self.state and self.state.status == "running" else 0.0

    @property
    def node(self) -> str | None:
        """Where it runs."""
        return (self.state.node_id if self.state else None) or self.facts.node


@dataclass(frozen=True)
class Watched:
    """Everything that decisions about one attempt look at."""

    job: JobFacts
    attempt: AttemptFacts
    ranks: tuple[RankView, ...]
    policy: Policy
    listed: bool  # the cluster has it
    answered: bool  # the cluster answered at all
    adopted: bool
    absent_since: datetime | None
    now: datetime

    def older(self, moment: datetime | None, seconds: float) -> bool:
        """Whether `moment` is at least so long ago; an unknown one is not."""
        return moment is not None and self.now - moment >= timedelta(seconds=seconds)


def watch(snapshot: Snapshot, job: JobFacts, attempt: AttemptFacts, now: datetime) -> Watched:
    """Put the facts of one attempt together."""
    listed = snapshot.cluster.by_id.get(attempt.id) if snapshot.cluster else None
    states = {s.rank: s for s in listed.ranks} if listed else {}
    return Watched(
        job=job,
        attempt=attempt,
        ranks=tuple(RankView(r.rank, r, states.get(r.rank)) for r in attempt.ranks),
        policy=snapshot.policy,
        listed=listed is not None,
        answered=snapshot.cluster is not None,
        adopted=attempt.id in snapshot.adopted,
        absent_since=snapshot.absent_since.get(attempt.id),
        now=now,
    )


def supervise(w: Watched) -> list[Command]:
    """The commands for one attempt now."""
    return [*_keep_in_step(w), *(_let_go(w) if w.attempt.reason else _follow(w))]


def _keep_in_step(w: Watched) -> Iterator[Command]:
    if w.listed and not w.adopted:
        yield Adopt(w.attempt.id)
    if w.job.desired is not Desired.RUN and is_legal(w.job.status, Status.STOPPING):
        yield MarkStopping(w.job.id, w.attempt.id)


def _follow(w: Watched) -> list[Command]:
    outcome = _end(w)
    if outcome is not None:
        return [*_caught_up(w, outcome), *_decided(w, outcome)]
    if w.job.desired is not Desired.RUN:
        return _stop(w)
    if w.attempt.status is AttemptStatus.STARTING and w.ranks and all(r.training for r in w.ranks):
        return [MarkRunning(w.job.id, w.attempt.id)]
    return []


def _caught_up(w: Watched, outcome: Outcome) -> Iterator[Command]:
    if outcome.reason == "finished" and w.job.status is Status.STARTING:  # it ended before it was seen to train
        yield MarkRunning(w.job.id, w.attempt.id)


def _decided(w: Watched, outcome: Outcome) -> Iterator[Command]:
    yield Decide(w.attempt.id, outcome.reason, outcome.data, outcome.error)
    if not all(r.gone for r in w.ranks):
        yield Kill(w.attempt.id)


def _end(w: Watched) -> Outcome | None:
    if not w.answered:
        return None
    return _ended_by_ranks(w) or _ended_by_absence(w) or _ended_by_person(w) or _ended_by_clock(w)


def _ended_by_ranks(w: Watched) -> Outcome | None:
    results = {r.rank: r.result for r in w.ranks if r.result is not None}
    lost = {r.rank: r.node or "an unknown node" for r in w.ranks if r.lost}
    outcome = outcome_of(results, lost, len(w.ranks), w.job.desired, w.job.steps)
    if outcome is not None and outcome.reason == STOP_REASONS.get(w.job.desired):
        return Outcome(stop_reason(w.job), _asked(w.job))
    if outcome is None or not outcome.suspect:
        return outcome
    newest = max(result.at for result in results.values())
    complete = len(results) + len(lost) == len(w.ranks)
    return outcome if complete or w.older(newest, w.policy.culprit_seconds) else None


def _ended_by_absence(w: Watched) -> Outcome | None:
    if w.listed:
        return None
    if w.attempt.launched_at is None:
        return Outcome("launch_lost", {})
    if w.older(w.absent_since, w.policy.lost_seconds):
        return Outcome("node_lost", {})
    return None


def _ended_by_person(w: Watched) -> Outcome | None:
    if w.job.desired is Desired.KILL:
        return Outcome("killed", _asked(w.job))
    if w.job.desired is Desired.RUN:
        return None
    if not all(r.training for r in w.ranks):  # nothing worth a checkpoint yet
        return Outcome(stop_reason(w.job), _asked(w.job))
    grace = w.job.stop_grace_seconds
    saving = [r for r in w.ranks if r.facts.phase == "saving"]
    if saving and not all(w.older(r.facts.phase_at, w.policy.save_deadline_seconds) for r in saving):
        return None
    if w.older(w.attempt.stop_at, grace):
        return Outcome("grace_expired", {**_asked(w.job), "seconds": grace})
    return None


def _ended_by_clock(w: Watched) -> Outcome | None:
    if w.job.desired is not Desired.RUN:
        return None
    return _start_deadline(w) or _no_progress(w)


def _start_deadline(w: Watched) -> Outcome | None:
    missing = [r for r in w.ranks if r.facts.phase not in _JOINED and r.step == 0]
    if not missing or any(r.facts.phase == "preparing" for r in w.ranks):
        return None
    joining = [r.facts.phase_at for r in w.ranks if r.facts.phase == "joining" and r.facts.phase_at]
    since = max([m for m in (w.attempt.launched_at or w.attempt.created_at, *joining) if m is not None])
    if not w.older(since, w.policy.start_deadline_seconds):
        return None
    first = min(missing, key=lambda r: (r.facts.phase == "joining", r.rank))
    seconds = w.policy.start_deadline_seconds
    return Outcome("start_deadline", {"rank": first.rank, "node": first.node, "seconds": seconds})


def _no_progress(w: Watched) -> Outcome | None:
    moved = [m for r in w.ranks if (m := r.facts.phase_at) is not None]
    if w.attempt.last_step_at is not None:
        moved.append(w.attempt.last_step_at)
    if any(r.facts.phase not in _JOINED and r.step == 0 for r in w.ranks):
        return None
    if not moved or not w.older(max(moved), w.policy.no_progress_seconds):
        return None
    seconds = w.policy.no_progress_seconds
    quietest = max(w.ranks, key=lambda r: r.silent_seconds)
    if quietest.silent_seconds >= w.policy.unreachable_seconds:  # stopped, or its machine is: not the user's fault
        return Outcome("rank_silent", {"rank": quietest.rank, "node": quietest.node, "seconds": seconds})
    saving = next((r for r in w.ranks if r.facts.phase == "saving"), None)
    if saving is not None:  # the store or its writer hangs: not the user's fault either
        return Outcome(
            "storage_failed",
            {"message": f"rank {saving.rank} waits for a save that made no progress for {seconds:g} s"},
        )
    slowest = min(w.ranks, key=lambda r: (r.step, r.rank))
    return Outcome("no_progress", {"rank": slowest.rank, "seconds": seconds})


def _stop(w: Watched) -> list[Command]:
    if w.attempt.stop_at is None and w.listed:
        return [Stop(w.attempt.id)]
    return []


def stop_reason(job: JobFacts) -> str:
    """The reason of a job that is being stopped: the one stored with the stop, when it fits what is wanted now."""
    usual = STOP_REASONS[job.desired]
    stored = REASONS.get(job.reason or "")
    return stored.code if stored and stored.status is REASONS[usual].status else usual


def _asked(job: JobFacts) -> Data:
    actor = job.reason_data.get("actor")
    return {"actor": actor} if actor is not None else {}


def _let_go(w: Watched) -> list[Command]:
    if not w.answered:
        return []
    if not all(r.gone for r in w.ranks):
        unsent = w.attempt.kill_at is None or w.older(w.attempt.kill_at, w.policy.culprit_seconds)
        return [Kill(w.attempt.id)] if unsent else []
    if all(r.drained for r in w.ranks) or w.older(w.attempt.ended_at, w.policy.drain_seconds):
        return [finish(w.job, w.attempt, w.policy, w.now)]
    return []


def finish(job: JobFacts, attempt: AttemptFacts, policy: Policy, now: datetime) -> Finish:
    """Where the job goes once an attempt with a reason is released.

    A cancelled job is cancelled however its ranks ended; a paused one fails only by its own failure; the rest retries.
    """
    assert attempt.reason is not None, attempt.id
    reason, data = attempt.reason, attempt.reason_data
    end = Finish(job.id, attempt.id, Status.FAILED, reason, data, job.user_failures, job.infrastructure_failures)
    end = replace(end, progress_step=job.progress_step)
    if reason == "finished":
        return replace(end, status=Status.SUCCEEDED)
    if job.desired is not Desired.RUN:
        return _finish_stopped(job, end)
    verdict = after_failure(job, reason, policy, now)
    end = replace(
        end,
        user_failures=verdict.user_failures,
        infrastructure_failures=verdict.infrastructure_failures,
        progress_step=verdict.progress_step,
        not_before=verdict.not_before,
    )
    if not verdict.again:
        return end
    if retry_class(reason) == "free":
        return replace(end, status=Status.QUEUED)
    why: Data = {"code": reason, "message": sentence(reason, data)}
    return replace(end, status=Status.QUEUED, reason="retrying", data=why)


def _finish_stopped(job: JobFacts, end: Finish) -> Finish:
    if job.desired is Desired.PAUSE and retry_class(end.reason) in ("none", "user") and not _is_stop(end.reason):
        return end
    status = Status.PAUSED if job.desired is Desired.PAUSE else Status.CANCELLED
    if _is_stop(end.reason):
        return replace(end, status=status)
    return replace(end, status=status, reason=stop_reason(job), data=_asked(job))


def _is_stop(reason: str) -> bool:
    return REASONS[reason].status in (Status.PAUSED, Status.CANCELLED)
