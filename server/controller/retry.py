"""What follows a failure: another try or the end. Pure.

The class of a failure stands in the table of reasons. Each class has a budget in the spec; the count of both starts
again when, and only when, a later checkpoint exists than at the failure counted before. Printing is not progress.

Note: why back-off never changes the order. A job that waits out its back-off keeps its place in the queue; it only
cannot start yet. Sorting by "next try" would let a newcomer pass a job that has waited for an hour.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from server.controller.snapshot import JobFacts, Policy
from server.reasons import REASONS, RetryClass


@dataclass(frozen=True)
class Verdict:
    """Whether to try again, and the counters to store either way."""

    again: bool
    user_failures: int
    infrastructure_failures: int
    progress_step: int
    not_before: datetime | None = None


def after_failure(job: JobFacts, reason: str, policy: Policy, now: datetime) -> Verdict:
    """What follows when an attempt of `job` ended with `reason`."""
    progressed = job.checkpoint_step > job.progress_step
    user = 0 if progressed else job.user_failures
    infrastructure = 0 if progressed else job.infrastructure_failures
    step = max(job.checkpoint_step, job.progress_step)
    match retry_class(reason):
        case "free":
            pause = timedelta(seconds=policy.first_backoff_seconds)
            return Verdict(True, user, infrastructure, step, now + pause)
        case "user":
            user += 1
            again = user <= job.user_budget
        case "infrastructure":
            infrastructure += 1
            again = infrastructure <= job.infrastructure_budget
        case "none":
            again = False
    wait = backoff_seconds(user + infrastructure, policy)
    return Verdict(again, user, infrastructure, step, now + timedelta(seconds=wait) if again else None)


def retry_class(reason: str) -> RetryClass:
    """The class of a reason; one that the table does not have is not retried."""
    known = REASONS.get(reason)
    return known.retry if known else "none"


def backoff_seconds(failures: int, policy: Policy) -> float:
    """Seconds before try number `failures` + 1: doubled by each failure since the last progress, with a ceiling."""
    doubled = policy.first_backoff_seconds * 2.0 ** min(max(failures - 1, 0), 60)
    return min(doubled, policy.last_backoff_seconds)
