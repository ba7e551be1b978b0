"""The pauses of a rank's sender: short while a person waits, longer later, and none before the last word."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

from workers.send_pace import BRISK_SECONDS, CALM_SECONDS, LONGEST_PAUSE_SECONDS, between_looks, has_step, while_away
from workers.spool_sender import BATCH_RECORDS, SPOOL_FILE, Answer, Origin, SpoolSender

AT = "2026-11-01T12:00:00+00:00"


def test_pauses_grow_with_the_training_and_have_an_end() -> None:
    """Property: a tenth of a second up to five seconds of training, one second from fifty on, never shorter again."""
    pauses = [between_looks(seconds) for seconds in range(100)]
    assert pauses == sorted(pauses)
    assert {*pauses[:6]} == {BRISK_SECONDS} and {*pauses[50:]} == {CALM_SECONDS}
    assert [while_away(tries) for tries in (1, 2)] == [0.2, 0.4] and while_away(10**9) == LONGEST_PAUSE_SECONDS


def test_only_a_completed_step_ends_the_waiting_for_it() -> None:
    """Property: neither phases, nor the evaluation before step 1, nor what is no record count as a step."""
    assert not has_step(['{"kind": "phase", "phase": "training"}', '{"kind": "points", "step": 0}', "[]", "{", "5"])
    assert has_step(['{"kind": "points", "step": 1, "values": {}}']) and has_step(['{"kind": "memory", "step": 7}'])


class Pauses(threading.Event):
    """Instead of waiting: notes for how long, and lets the next thing happen."""

    def __init__(self, *happens: Callable[[], None]) -> None:
        super().__init__()
        self.happens = list(happens)
        self.asked: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            self.asked.append(timeout or 0.0)
            self.happens.pop(0)() if self.happens else self.set()
        return self.is_set()


def test_a_backlog_and_the_end_of_a_rank_wait_for_nothing(tmp_path: Path) -> None:
    """Property: after hours of training a pause is asked for only when all that was written has been sent."""
    seqs: list[int] = []

    def post(body: bytes) -> tuple[Answer, int]:
        seqs.append(json.loads(body)["seq"])
        return "applied", seqs[-1]

    def write(first: int, count: int) -> None:
        with (tmp_path / SPOOL_FILE).open("a") as spool:
            for step in range(first, first + count):
                spool.write(json.dumps({"kind": "points", "at": AT, "step": step, "values": {}}) + "\n")

    write(0, 3 * BATCH_RECORDS)
    sender = SpoolSender(tmp_path, Origin("attempt", 1, 0), post)
    sender._trains_since = -1e9
    sender.ended = Pauses(lambda: write(9000, 1))
    sender.run(threading.Event())
    assert sender.ended.asked == [CALM_SECONDS, CALM_SECONDS]  # after the backlog, and after the one more step
    assert sender.closed and seqs == [1, 2, 3, 4, 5]


def test_a_sender_looks_often_until_its_first_step_was_sent(tmp_path: Path) -> None:
    """Property: an hour of preparing data does not delay the news of step 1."""
    sender = SpoolSender(tmp_path, Origin("attempt", 1, 0), lambda body: ("applied", json.loads(body)["seq"]))

    def first_step() -> None:
        (tmp_path / SPOOL_FILE).write_text(json.dumps({"kind": "points", "at": AT, "step": 1, "values": {}}) + "\n")

    sender.ended = Pauses(lambda: None, first_step, lambda: None)
    assert sender._trained_seconds() == 0.0
    sender.run(threading.Event())
    assert sender.ended.asked == [BRISK_SECONDS] * 4 and sender._trained_seconds() > 0.0
