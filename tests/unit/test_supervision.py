"""One attempt, with literals: start, stop, failure, adoption, release."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from server.controller.actions import Adopt, Command, Decide, Finish, Kill, MarkRunning, Stop
from server.controller.cluster import AttemptState, ClusterState, RankState
from server.controller.scheduler import plan
from server.controller.snapshot import AttemptFacts, JobFacts, Policy, RankFacts, Snapshot
from server.reasons import REASONS
from server.states import AttemptStatus, Desired, Status, is_legal
from workers.contract import AttemptId, ErrorInfo, JobId, ResultRecord

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
A, J = AttemptId("a"), JobId("j")


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


JOB = JobFacts(
    id=J,
    status=Status.RUNNING,
    desired=Desired.RUN,
    priority=50,
    queued_at=ago(100),
    ranks=2,
    device="cpu",
    stop_grace_seconds=5.0,
    steps=80,
    fence=1,
    infrastructure_budget=10,
)
TRAINING = tuple(RankFacts(r, phase="training", phase_at=ago(10), step=7, node="n") for r in (0, 1))
ATTEMPT = AttemptFacts(
    A, J, 1, AttemptStatus.RUNNING, "cpu", ago(90), TRAINING, launched_at=ago(80), started_at=ago(70), last_step_at=NOW
)


def result(outcome: str, at: float = 0, code: str | None = None, **facts: object) -> ResultRecord:
    error = None
    if outcome == "failed":
        error = ErrorInfo(type="ValueError", message="bad", traceback="trace", code=code)
    return ResultRecord.model_validate({"at": ago(at), "outcome": outcome, "error": error, **facts})


def ended(*results: ResultRecord | None, closed: bool = True) -> tuple[RankFacts, ...]:
    pairs = zip(TRAINING, results, strict=True)
    return tuple(replace(r, result=x, closed=closed and x is not None) for r, x in pairs)


def states(*statuses: str) -> tuple[RankState, ...]:
    return tuple(RankState(rank, status, "n") for rank, status in enumerate(statuses))  # type: ignore[arg-type]


def look(
    job: JobFacts = JOB,
    attempt: AttemptFacts = ATTEMPT,
    ranks: tuple[RankState, ...] | None = states("running", "running"),
    **facts: object,
) -> list[Command]:
    seen = () if ranks is None else (AttemptState(A, J, 1, ranks),)
    fields: dict[str, object] = {"adopted": frozenset({A}), "cluster": ClusterState((), seen), **facts}
    return plan(Snapshot(jobs=(job,), attempts=(attempt,), **fields), NOW)  # type: ignore[arg-type]


def decided(commands: list[Command]) -> Decide:
    (found,) = [c for c in commands if isinstance(c, Decide)]
    return found


def finished(commands: list[Command]) -> Finish:
    (found,) = [c for c in commands if isinstance(c, Finish)]
    return found


def asked(desired: Desired, reason: str, **facts: object) -> JobFacts:
    data = {"actor": "ada"}
    return replace(JOB, status=Status.STOPPING, desired=desired, reason=reason, reason_data=data, **facts)  # type: ignore[arg-type]


CANCEL = asked(Desired.CANCEL, "cancelled_by_user")
PAUSE = asked(Desired.PAUSE, "paused_by_user")
KILL = asked(Desired.KILL, "killed")


def test_a_healthy_attempt_is_left_alone() -> None:
    """No command at all."""
    assert look() == []


def test_the_job_runs_when_every_rank_trains_and_not_before() -> None:
    """One rank that still builds holds it in starting."""
    job = replace(JOB, status=Status.STARTING)
    starting = replace(ATTEMPT, status=AttemptStatus.STARTING)
    assert look(job, starting) == [MarkRunning(J, A)]
    late = (TRAINING[0], replace(TRAINING[1], phase="building", step=0))
    assert look(job, replace(starting, ranks=late)) == []


def test_an_attempt_that_this_server_did_not_launch_is_adopted_first() -> None:
    """After a restart the actors learn where reports go now."""
    assert look(adopted=frozenset()) == [Adopt(A)]


def test_a_launch_on_its_way_is_not_judged() -> None:
    """Its absence means nothing yet."""
    attempt = replace(ATTEMPT, launched_at=None, status=AttemptStatus.STARTING)
    assert look(attempt=attempt, ranks=None, launching=frozenset({A})) == []


def test_a_launch_that_never_happened_starts_again_without_counting() -> None:
    """Killed between the row and the cluster: decided, then released, then queued."""
    attempt = replace(ATTEMPT, launched_at=None, status=AttemptStatus.STARTING)
    assert decided(look(attempt=attempt, ranks=None)).reason == "launch_lost"
    end = finished(look(attempt=replace(attempt, reason="launch_lost", ended_at=NOW), ranks=None))
    assert (end.status, end.infrastructure_failures) == (Status.QUEUED, 0)


def test_one_answer_without_the_attempt_is_not_its_death() -> None:
    """It must stay away for a while; a cluster that does not answer says nothing at all."""
    assert look(ranks=None, absent_since={A: ago(4)}) == []
    assert look(cluster=None) == []
    assert decided(look(ranks=None, absent_since={A: ago(5)})).reason == "node_lost"


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_a_cancel_asks_all_ranks_to_stop_once() -> None:
    """The second look waits."""
    assert look(CANCEL) == [Stop(A)]
    assert look(CANCEL, replace(ATTEMPT, stop_at=ago(1))) == []


def test_a_rank_deaf_to_the_stop_is_killed_when_the_grace_is_over() -> None:
    """After stop_grace_seconds without a boundary; the reason says so."""
    commands = look(CANCEL, replace(ATTEMPT, stop_at=ago(5)))
    assert decided(commands).reason == "grace_expired"
    assert Kill(A) in commands


def test_a_save_may_take_longer_than_the_grace_but_not_for_ever() -> None:
    """The grace is for the next boundary; the save after it has a limit of its own."""
    saving = tuple(replace(r, phase="saving", phase_at=ago(20)) for r in TRAINING)
    attempt = replace(ATTEMPT, stop_at=ago(60), ranks=saving)
    assert look(CANCEL, attempt) == []
    stuck = tuple(replace(r, phase_at=ago(300)) for r in saving)
    assert decided(look(CANCEL, replace(attempt, ranks=stuck))).reason == "grace_expired"


def test_a_kill_acts_at_once_also_during_the_grace() -> None:
    """No stop flag, no waiting."""
    commands = look(KILL, replace(ATTEMPT, stop_at=ago(1)))
    assert decided(commands).reason == "killed"
    assert Kill(A) in commands


def test_a_cancel_before_training_kills_since_there_is_nothing_to_save() -> None:
    """While workers import or join, cancelled within seconds."""
    young = tuple(RankFacts(r, phase="joining", phase_at=ago(1)) for r in (0, 1))
    job = replace(CANCEL, status=Status.STOPPING)
    commands = look(job, replace(ATTEMPT, ranks=young, status=AttemptStatus.STARTING))
    assert decided(commands).reason == "cancelled_by_user"
    assert Kill(A) in commands


def test_a_decided_attempt_is_released_only_when_its_ranks_are_gone_and_their_reports_applied() -> None:
    """First the kill again if need be, then the drain, then the release."""
    end = replace(ATTEMPT, reason="cancelled_by_user", reason_data={"actor": "ada"}, ended_at=ago(1), kill_at=ago(1))
    assert look(CANCEL, end) == []
    assert look(CANCEL, replace(end, kill_at=ago(5))) == [Kill(A)]
    gone = replace(end, ranks=ended(result("died", signal=9), result("died", signal=9), closed=False))
    assert look(CANCEL, gone, states("exited", "exited")) == []
    drained = replace(gone, ranks=ended(result("died", signal=9), result("died", signal=9)))
    assert finished(look(CANCEL, drained, states("exited", "exited"))).status is Status.CANCELLED


def test_reports_that_never_come_do_not_hold_a_release_for_ever() -> None:
    """The drain has a limit."""
    lost = replace(ATTEMPT, reason="rank_lost", ended_at=ago(10))
    assert finished(look(attempt=lost, ranks=states("lost", "lost"))).status is Status.QUEUED


@pytest.mark.parametrize(
    ("job", "reason", "expected", "shown"),
    [
        (PAUSE, "paused_by_user", Status.PAUSED, "paused_by_user"),
        (PAUSE, "grace_expired", Status.PAUSED, "grace_expired"),
        (PAUSE, "rank_died", Status.PAUSED, "paused_by_user"),
        (PAUSE, "user_error", Status.FAILED, "user_error"),
        (PAUSE, "finished", Status.SUCCEEDED, "finished"),
        (CANCEL, "cancelled_by_user", Status.CANCELLED, "cancelled_by_user"),
        (CANCEL, "grace_expired", Status.CANCELLED, "grace_expired"),
        (CANCEL, "rank_died", Status.CANCELLED, "cancelled_by_user"),
        (CANCEL, "user_error", Status.CANCELLED, "cancelled_by_user"),
        (CANCEL, "node_lost", Status.CANCELLED, "cancelled_by_user"),
        (CANCEL, "finished", Status.SUCCEEDED, "finished"),
        (KILL, "killed", Status.CANCELLED, "killed"),
        (KILL, "cancelled_by_user", Status.CANCELLED, "cancelled_by_user"),
        (JOB, "finished", Status.SUCCEEDED, "finished"),
        (JOB, "user_error", Status.FAILED, "user_error"),
        (JOB, "entry_failed", Status.FAILED, "entry_failed"),
        (JOB, "rank_died", Status.QUEUED, "retrying"),
        (JOB, "orphaned", Status.QUEUED, "orphaned"),
    ],
)
def test_where_a_job_goes_follows_from_what_was_asked_and_how_it_ended(
    job: JobFacts, reason: str, expected: Status, shown: str
) -> None:
    """What a person asked for wins over failures; only a pause gives way to the job's own fault."""
    attempt = replace(ATTEMPT, reason=reason, ended_at=ago(1), ranks=ended(result("stopped"), result("stopped")))
    end = finished(look(job, attempt, states("exited", "exited")))
    assert (end.status, end.reason) == (expected, shown)


@pytest.mark.parametrize("reason", sorted(REASONS))
@pytest.mark.parametrize("desired", list(Desired))
def test_every_reason_leads_from_every_live_state_over_a_legal_edge(reason: str, desired: Desired) -> None:
    """Whatever an attempt ended with, the job can move: no reason leaves it stuck in a live state."""
    status = Status.RUNNING if desired is Desired.RUN else Status.STOPPING
    job = replace(JOB, status=status, desired=desired)
    attempt = replace(ATTEMPT, reason=reason, ended_at=ago(1), ranks=ended(result("stopped"), result("stopped")))
    assert is_legal(status, finished(look(job, attempt, states("exited", "exited"))).status)


# --- the end by itself ------------------------------------------------------------------------------------------------


def test_all_ranks_finished_is_success_also_before_it_was_seen_to_train() -> None:
    """A job of one step may end within one look."""
    ranks = ended(result("finished"), result("finished"))
    job = replace(JOB, status=Status.STARTING)
    commands = look(job, replace(ATTEMPT, ranks=ranks, status=AttemptStatus.STARTING), states("exited", "exited"))
    assert commands[0] == MarkRunning(J, A)
    assert decided(commands).reason == "finished"


def test_the_first_failing_rank_is_the_culprit_and_its_traceback_the_reason() -> None:
    """Rank 1 raised; rank 0 only lost its peer, even if its word came first."""
    ranks = ended(result("failed", at=3, code="peer_lost"), result("failed", at=2))
    decision = decided(look(attempt=replace(ATTEMPT, ranks=ranks), ranks=states("exited", "exited")))
    assert (decision.reason, decision.data["rank"]) == ("user_error", 1)
    assert decision.error is not None
    assert decision.error["traceback"] == "trace"


def test_a_victim_alone_waits_for_the_culprit_then_speaks_for_itself() -> None:
    """`peer_lost` with the peer still silent is not yet a verdict."""
    fresh = ended(result("failed", at=1, code="peer_lost"), None)
    assert look(attempt=replace(ATTEMPT, ranks=fresh), ranks=states("exited", "running")) == []
    old = ended(result("failed", at=3, code="peer_lost"), None)
    commands = look(attempt=replace(ATTEMPT, ranks=old), ranks=states("exited", "running"))
    assert decided(commands).reason == "peer_lost"
    assert Kill(A) in commands


def test_one_failed_rank_ends_the_others() -> None:
    """They would hang in their next exchange: all are killed, one failure counts."""
    ranks = ended(None, result("failed"))
    commands = look(attempt=replace(ATTEMPT, ranks=ranks), ranks=states("running", "exited"))
    assert [type(c) for c in commands] == [Decide, Kill]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (result("died", signal=9), "rank_died"),
        (result("died", signal=11), "rank_died"),
        (result("died", exit_code=3), "rank_exited"),
        (result("died", exit_code=74), "storage_failed"),  # it could not even write its result
        (result("failed"), "user_error"),
        (result("failed", code="entry_failed"), "entry_failed"),
        (result("failed", code="out_of_memory"), "out_of_memory"),
        (result("failed", code="data_invalid"), "data_invalid"),
        (result("failed", code="checkpoint_unreadable"), "checkpoint_unreadable"),
        (result("failed", code="storage_failed"), "storage_failed"),
        (result("failed", code="model_unsupported"), "spec_invalid"),
        (result("failed", code="config_invalid"), "spec_invalid"),
        (result("failed", code="writer_died"), "storage_failed"),
        (result("failed", code="something_new"), "user_error"),
    ],
)
def test_each_way_to_fail_has_its_reason(what: ResultRecord, reason: str) -> None:
    """By type and code, never by text."""
    ranks = ended(what, result("failed", at=-1, code="peer_lost"))
    assert decided(look(attempt=replace(ATTEMPT, ranks=ranks), ranks=states("exited", "exited"))).reason == reason


def test_a_rank_that_vanished_with_its_actor_is_lost_and_ends_the_rest() -> None:
    """Infrastructure; the node is named."""
    commands = look(ranks=states("running", "lost"))
    assert decided(commands).data == {"rank": 1, "node": "n"}
    assert decided(commands).reason == "rank_lost"
    assert Kill(A) in commands


def test_what_a_rank_reported_counts_even_when_its_actor_is_gone() -> None:
    """Finished is finished: results in the database are not overruled by a lost actor."""
    ranks = ended(result("finished"), result("finished"))
    assert decided(look(attempt=replace(ATTEMPT, ranks=ranks), ranks=states("lost", "exited"))).reason == "finished"


# --- clocks -----------------------------------------------------------------------------------------------------------


def starting(*phases: str | None, launched: float = 121, at: float = 121) -> AttemptFacts:
    ranks = tuple(RankFacts(r, phase=p, phase_at=ago(at) if p else None, node="n") for r, p in enumerate(phases))
    return replace(ATTEMPT, status=AttemptStatus.STARTING, ranks=ranks, launched_at=ago(launched), last_step_at=None)


STARTING = replace(JOB, status=Status.STARTING)


def test_the_start_deadline_names_the_rank_that_is_missing() -> None:
    """Rank 1 never spoke; the one that waits in joining is not to blame."""
    decision = decided(look(STARTING, starting("joining", None)))
    assert decision.reason == "start_deadline"
    assert (decision.data["rank"], decision.data["node"]) == (1, "n")


def test_preparing_data_has_its_own_clock() -> None:
    """While one rank tokenizes nothing runs out, and afterwards the start begins again."""
    assert look(STARTING, starting("preparing", "joining", launched=10_000, at=10_000)) == []
    assert look(STARTING, starting("joining", "started", launched=10_000, at=119)) == []


def test_joined_ranks_are_not_measured_by_the_start_deadline() -> None:
    """A long build or restore is progress of another kind."""
    assert look(STARTING, starting("building", "restoring")) == []


def test_training_without_a_step_for_too_long_is_ended_and_the_slowest_named() -> None:
    """Stuck in an exchange: the rank behind is the one to look at."""
    ranks = (TRAINING[0], replace(TRAINING[1], step=6))
    stuck = tuple(replace(r, phase_at=ago(2000)) for r in ranks)
    decision = decided(look(attempt=replace(ATTEMPT, ranks=stuck, last_step_at=ago(1800))))
    assert (decision.reason, decision.data["rank"]) == ("no_progress", 1)


def test_a_silent_rank_is_the_machines_failure_not_the_users() -> None:
    """A stopped rank and one that waits for it look alike in steps; only one of them gives no sign of life."""
    stuck = replace(ATTEMPT, ranks=tuple(replace(r, phase_at=ago(2000)) for r in TRAINING), last_step_at=ago(1800))
    seen = (RankState(0, "running", "n"), RankState(1, "running", "n1", heartbeat_age_seconds=1800.0))
    decision = decided(look(attempt=stuck, ranks=seen))
    assert (decision.reason, decision.data["rank"], decision.data["node"]) == ("rank_silent", 1, "n1")


def test_a_save_that_hangs_is_the_stores_failure_not_the_users() -> None:
    """All ranks live, none of them steps, and one waits for its save: tried again."""
    stuck = tuple(replace(r, phase_at=ago(2000)) for r in (TRAINING[0], replace(TRAINING[1], phase="saving")))
    decision = decided(look(attempt=replace(ATTEMPT, ranks=stuck, last_step_at=ago(1800))))
    assert decision.reason == "storage_failed" and "rank 1" in decision.data["message"]


def test_the_policy_comes_from_the_snapshot() -> None:
    """Deadlines are settings, not constants."""
    quick = Policy(start_deadline_seconds=1.0)
    assert decided(look(STARTING, starting("joining", None, launched=2, at=2), policy=quick)).reason == "start_deadline"
