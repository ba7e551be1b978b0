"""Budgets and back-off."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from server.controller.retry import after_failure, backoff_seconds, retry_class
from server.controller.scheduler import queue_order
from server.controller.snapshot import JobFacts, Policy
from server.states import Desired, Status
from workers.contract import JobId

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
POLICY = Policy(first_backoff_seconds=1.0, last_backoff_seconds=60.0)


def job(**changes: object) -> JobFacts:
    facts = JobFacts(
        id=JobId("job"),
        status=Status.RUNNING,
        desired=Desired.RUN,
        priority=50,
        queued_at=NOW,
        ranks=2,
        device="cpu",
        stop_grace_seconds=30.0,
        user_budget=1,
        infrastructure_budget=2,
    )
    return replace(facts, **changes)  # type: ignore[arg-type]


def fail(facts: JobFacts, reason: str) -> tuple[JobFacts, bool]:
    verdict = after_failure(facts, reason, POLICY, NOW)
    counted = replace(
        facts,
        user_failures=verdict.user_failures,
        infrastructure_failures=verdict.infrastructure_failures,
        progress_step=verdict.progress_step,
    )
    return counted, verdict.again


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("user_error", "user"),
        ("rank_exited", "user"),
        ("rank_died", "infrastructure"),
        ("rank_lost", "infrastructure"),
        ("node_lost", "infrastructure"),
        ("peer_lost", "infrastructure"),
        ("start_deadline", "infrastructure"),
        ("launch_failed", "infrastructure"),
        ("storage_failed", "infrastructure"),
        ("launch_lost", "free"),
        ("no_room", "free"),
        ("preempted", "free"),
        ("orphaned", "free"),
        ("entry_failed", "none"),
        ("out_of_memory", "none"),
        ("data_invalid", "none"),
        ("a reason that nobody knows", "none"),
    ],
)
def test_the_class_of_a_failure_stands_in_the_table(reason: str, expected: str) -> None:
    """One case per reason: what the platform did is never the user's failure, and what cannot help is not tried."""
    assert retry_class(reason) == expected


def test_the_limit_is_exact() -> None:
    """A budget of two gives two more tries, not one and not three."""
    facts, tries = job(), []
    for _ in range(4):
        facts, again = fail(facts, "rank_died")
        tries.append(again)
    assert tries == [True, True, False, False]


def test_infrastructure_failures_do_not_eat_the_users_budget() -> None:
    """Two lost nodes, then one exception: counters two and one, and the exception is still tried again."""
    facts, _ = fail(job(), "node_lost")
    facts, _ = fail(facts, "node_lost")
    facts, again = fail(facts, "user_error")
    assert (facts.infrastructure_failures, facts.user_failures, again) == (2, 1, True)


def test_a_crash_loop_without_a_later_checkpoint_never_gets_its_budget_back() -> None:
    """Output, steps and the same checkpoint again are not progress."""
    facts = job(checkpoint_step=100, progress_step=100)
    for _ in range(2):
        facts, again = fail(facts, "rank_died")
        assert again
    assert not fail(facts, "rank_died")[1]


def test_a_later_checkpoint_gives_the_budget_back() -> None:
    """Ten failures, each after a new checkpoint, under a budget of two: the job keeps going."""
    facts = job()
    for number in range(10):
        facts, again = fail(replace(facts, checkpoint_step=(number + 1) * 50), "rank_died")
        assert again
        assert facts.infrastructure_failures == 1


def test_an_earlier_checkpoint_than_the_counted_one_is_no_progress() -> None:
    """Resuming from further back and dying again does not reset anything."""
    facts = job(checkpoint_step=50, progress_step=100, infrastructure_failures=2)
    assert not fail(facts, "rank_died")[1]


def test_free_reasons_count_nothing_and_always_go_on() -> None:
    """Making room for others or a launch that never ran is nobody's failure."""
    facts = job(infrastructure_failures=2, user_failures=1)
    after, again = fail(facts, "preempted")
    assert again
    assert (after.user_failures, after.infrastructure_failures) == (1, 2)


def test_backoff_doubles_up_to_its_ceiling() -> None:
    """1, 2, 4, ... 60, 60 seconds; also for absurd counts."""
    assert [backoff_seconds(n, POLICY) for n in (1, 2, 3, 7, 100_000)] == [1.0, 2.0, 4.0, 60.0, 60.0]


def test_backoff_never_changes_the_order_of_the_queue() -> None:
    """An hour of waiting and of failing leaves a job before an equal one that came later."""
    old = job(id=JobId("old"), not_before=NOW + timedelta(hours=1), infrastructure_failures=9)
    new = job(id=JobId("new"), queued_at=NOW + timedelta(seconds=1))
    assert [j.id for j in queue_order([new, old])] == ["old", "new"]
