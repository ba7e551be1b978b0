"""The table of states: what follows from it must stay true whatever edge is added."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from server.reasons import REASONS, sentence
from server.states import (
    BADGES,
    CAUSES,
    EDGES,
    ENDED,
    LIVE,
    NEXT,
    PREVIOUS,
    RESTING,
    STOP_REASONS,
    Action,
    Desired,
    Status,
    allowed_actions,
    decide,
    diagram,
    is_legal,
    rises,
    sql_check,
)

ALL = list(itertools.product(Status, Desired))


def test_the_reverse_table_is_the_table_read_backwards() -> None:
    """PREVIOUS and NEXT hold the same edges."""
    assert {(old, new) for old, news in NEXT.items() for new in news} == {
        (old, new) for new, olds in PREVIOUS.items() for old in olds
    }
    assert len(CAUSES) == len(EDGES), "an edge stands twice"


def test_the_derived_sets_are_those_of_the_design() -> None:
    """Live has an attempt, ended may be deleted, resting waits for a person."""
    assert {Status.STARTING, Status.RUNNING, Status.STOPPING} == LIVE
    assert {Status.SUCCEEDED, Status.FAILED, Status.CANCELLED} == ENDED
    assert ENDED | {Status.PAUSED, Status.DELETE_FAILED} == RESTING


def test_no_state_is_without_a_way_out() -> None:
    """From every state a job can be brought to an end and then be deleted: nothing is stuck for ever."""
    for status in Status:
        reached, frontier = {status}, [status]
        while frontier:
            fresh = NEXT[frontier.pop()] - reached
            reached |= fresh
            frontier += fresh
        assert Status.DELETING in reached, status


@pytest.mark.parametrize(("status", "desired"), ALL)
@pytest.mark.parametrize("action", list(Action))
def test_every_action_in_every_state_has_an_answer_that_the_table_allows(
    action: Action, status: Status, desired: Desired
) -> None:
    """`decide` is total, applies only legal edges, and never lowers the severity within an attempt."""
    decision = decide(action, status, desired)
    if decision.verdict != "apply":
        assert (decision.status, decision.desired) == (status, desired)
        return
    assert is_legal(status, decision.status) or decision.status is status is Status.STOPPING
    assert decision.reason in REASONS
    if status in LIVE:
        assert rises(desired, decision.desired)


@pytest.mark.parametrize(("status", "desired"), ALL)
@pytest.mark.parametrize("action", list(Action))
def test_an_action_that_was_applied_is_satisfied_when_it_comes_again(
    action: Action, status: Status, desired: Desired
) -> None:
    """A person who clicks twice gets the same answer, not an error."""
    first = decide(action, status, desired)
    if first.verdict == "apply":
        assert decide(action, first.status, first.desired).verdict == "satisfied"


@pytest.mark.parametrize("status", sorted(LIVE | {Status.QUEUED, Status.PAUSED}))
def test_whatever_has_not_ended_can_be_cancelled_and_killed(status: Status) -> None:
    """No state of a job that may hold or want slots is beyond a person's reach."""
    assert {Action.CANCEL, Action.KILL} <= set(allowed_actions(status, Desired.RUN))


def test_the_buttons_of_a_stopping_job_only_rise() -> None:
    """A job being cancelled can still be killed, and no longer paused."""
    assert allowed_actions(Status.STOPPING, Desired.CANCEL) == (Action.KILL, Action.CLONE)
    assert allowed_actions(Status.STOPPING, Desired.KILL) == (Action.CLONE,)


def test_waiting_jobs_end_at_once_and_live_ones_stop_first() -> None:
    """`paused` and `cancelled` of a live job come only from the controller, after the release."""
    assert decide(Action.CANCEL, Status.QUEUED, Desired.RUN).status is Status.CANCELLED
    assert decide(Action.PAUSE, Status.QUEUED, Desired.RUN).status is Status.PAUSED
    for status in LIVE:
        assert decide(Action.CANCEL, status, Desired.RUN).status is Status.STOPPING
        assert decide(Action.PAUSE, status, Desired.RUN).status is Status.STOPPING


def test_resume_begins_a_new_attempt_from_every_resting_state_but_a_failed_deletion() -> None:
    """The job is queued and wanted to run again."""
    for status in RESTING - {Status.DELETE_FAILED}:
        decision = decide(Action.RESUME, status, Desired.CANCEL)
        assert (decision.verdict, decision.status, decision.desired) == ("apply", Status.QUEUED, Desired.RUN)
    assert decide(Action.RESUME, Status.DELETE_FAILED, Desired.RUN).verdict == "impossible"
    assert decide(Action.RESUME, Status.STOPPING, Desired.PAUSE).verdict == "impossible"


def test_the_check_the_badges_and_the_diagram_know_every_state() -> None:
    """All three come from the table."""
    for status in Status:
        assert f"'{status}'" in sql_check()
        assert status in BADGES
        assert status in diagram()
    assert diagram().count("-->") == len(EDGES) + 2


@pytest.mark.parametrize("code", sorted(REASONS))
def test_every_reason_has_a_sentence_with_and_without_its_facts(code: str) -> None:
    """A fact that is missing, or of another type than expected, never breaks a page."""
    for data in ({}, {"rank": 1, "seconds": 5.0}, {"seconds": "soon", "rank": None}):
        text = sentence(code, data)
        assert text and "{" not in text


def test_a_reason_of_a_newer_server_is_shown_as_it_is() -> None:
    """Downgrades do not break pages either."""
    assert sentence("not_invented_yet") == "not_invented_yet"


def test_reasons_of_stops_end_where_the_stop_leads() -> None:
    """Pause leads to paused, the others to cancelled."""
    assert REASONS[STOP_REASONS[Desired.PAUSE]].status is Status.PAUSED
    assert REASONS[STOP_REASONS[Desired.CANCEL]].status is Status.CANCELLED
    assert REASONS[STOP_REASONS[Desired.KILL]].status is Status.CANCELLED


def test_the_diagram_in_the_docs_is_that_of_the_table(root: Path) -> None:
    """Whoever changes the table prints the diagram again."""
    assert diagram() in (root / "docs" / "lifecycle.md").read_text()


def test_a_sentence_is_one_short_line_whatever_its_facts_hold() -> None:
    """Property: a traceback with colours, line ends, a direction override and a megabyte of text stay readable."""
    trace = '\x1b[36mray::start()\x1b[39m \n  File "x.py"\n\tOSError: no space \u202e\x00 left \x1b]8;;x\x07\r\n'
    assert sentence("launch_failed", {"message": trace}) == (
        'The ranks could not be started: ray::start() File "x.py" OSError: no space \ufffd left'
    )
    assert len(sentence("user_error", {"rank": 0, "type": "E", "message": "y" * 10**6})) < 400
    said = sentence("user_error", {"rank": 0, "type": "Fehler", "message": "日本語 🙂 <b>"})
    assert said == "Rank 0 raised Fehler: 日本語 🙂 <b>"
