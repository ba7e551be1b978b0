"""From the spool to the server: every record once, in order, whatever is lost, repeated, refused or killed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.contract import ReportBatch
from workers.output_tail import complete_length, readable
from workers.spool_sender import (
    BATCH_RECORDS,
    OUTPUT_FILE,
    OUTPUT_HEAD_BYTES,
    SPOOL_FILE,
    Answer,
    Origin,
    ReportPost,
    SpoolSender,
)

AT = "2026-11-01T12:00:00+00:00"


class Server:
    """Applies each seq once; `misbehave` says per request what goes wrong."""

    def __init__(self, misbehave: Callable[[int], str] = lambda number: "") -> None:
        self.records: list[dict[str, Any]] = []
        self.applied = 0
        self.closed = False
        self.num_requests = 0
        self.misbehave = misbehave

    def __call__(self, body: bytes) -> tuple[Answer, int]:
        self.num_requests += 1
        trouble = self.misbehave(self.num_requests)
        if trouble == "down":
            return "away", 0
        if trouble == "forbid":
            return "forbidden", 0
        try:
            batch = ReportBatch.model_validate_json(body)
        except ValueError:
            return "refused", 0
        if batch.seq == self.applied + 1:
            self.applied = batch.seq
            self.records += json.loads(body)["records"]
            self.closed = batch.closed
        return ("away", 0) if trouble == "drop" else ("applied", self.applied)

    @property
    def steps(self) -> list[int]:
        return [record["step"] for record in self.records if record["kind"] == "points"]

    @property
    def output(self) -> str:
        return "".join(record["text"] for record in self.records if record["kind"] == "log")


def sender(folder: Path, server: Server, ended: bool = False) -> SpoolSender:
    made = SpoolSender(folder, Origin("attempt", 1, 0), server)
    if ended:
        made.ended.set()
    return made


def write(folder: Path, *steps: int, text: str = "") -> None:
    with (folder / SPOOL_FILE).open("a") as spool:
        for step in steps:
            spool.write(json.dumps({"kind": "points", "at": AT, "step": step, "values": {"loss": "NaN"}}) + "\n")
        spool.write(text)


def drain(sender: SpoolSender, tries: int = 1000) -> None:
    while not (sender.closed or sender.given_up):
        sender.step()
        tries -= 1
        assert tries > 0, "it never closes"


def test_records_and_output_arrive_once_and_then_it_closes(tmp_path: Path) -> None:
    """The plain way: two kinds of files, one order each, a last batch that says so."""
    server = Server()
    write(tmp_path, 1, 2)
    (tmp_path / OUTPUT_FILE).write_text("hello\nworld\n")
    mine = sender(tmp_path, server)
    assert mine.step() == "applied"
    write(tmp_path, 3)
    assert mine.step() == "applied"
    assert mine.step() is None and not mine.closed
    mine.ended.set()
    drain(mine)
    assert server.steps == [1, 2, 3] and server.output == "hello\nworld\n" and server.closed


def test_a_record_still_being_written_waits_for_its_end(tmp_path: Path) -> None:
    """Half a line is no record yet."""
    server = Server()
    write(tmp_path, 1, text='{"kind": "points", "at": "' + AT)
    mine = sender(tmp_path, server)
    mine.step()
    assert server.steps == [1]
    with (tmp_path / SPOOL_FILE).open("a") as spool:
        spool.write('", "step": 2, "values": {}}\n')
    mine.step()
    assert server.steps == [1, 2]


def test_a_record_torn_by_a_kill_is_an_event_and_the_rest_arrives(tmp_path: Path) -> None:
    """The rank died in the middle of a line; its actor appended how it ended."""
    server = Server()
    write(tmp_path, 1, text='{"kind": "points", "at"')
    with (tmp_path / SPOOL_FILE).open("a") as spool:
        spool.write("\n" + json.dumps({"kind": "result", "at": AT, "outcome": "died"}) + "\n")
    drain(sender(tmp_path, server, ended=True))
    assert [record["kind"] for record in server.records] == ["points", "event", "result"]
    assert server.records[1]["action"] == "report.torn"


def test_an_invalid_record_is_replaced_by_an_event_that_names_it(tmp_path: Path) -> None:
    """One bad record must not hold up the others for ever."""
    server = Server()
    write(tmp_path, 1, text=json.dumps({"kind": "points", "at": AT, "step": -4, "values": {}}) + "\n")
    write(tmp_path, 2)
    drain(sender(tmp_path, server, ended=True))
    assert server.steps == [1, 2]
    (event,) = [record for record in server.records if record["kind"] == "event"]
    assert event["action"] == "report.invalid" and "record 1" in event["message"]


def test_a_server_that_forgot_the_attempt_ends_the_sending(tmp_path: Path) -> None:
    """No retry for ever against a deleted job."""
    write(tmp_path, 1)
    mine = sender(tmp_path, Server(lambda number: "forbid"))
    assert mine.step() == "forbidden" and mine.given_up


def test_a_long_backlog_goes_in_bounded_batches(tmp_path: Path) -> None:
    """After an absence: no batch above the contract's limit, nothing missing."""
    server = Server()
    write(tmp_path, *range(3 * BATCH_RECORDS + 5))
    drain(sender(tmp_path, server, ended=True))
    assert server.steps == list(range(3 * BATCH_RECORDS + 5))
    assert server.num_requests >= 4


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_every_record_is_applied_once_under_any_trouble(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Random absences, lost answers, and senders killed between any two steps, with writing going on meanwhile."""
    chance, folder = random.Random(seed), tmp_path_factory.mktemp("spool")
    server = Server(lambda number: chance.choice(["", "", "down", "drop"]))
    mine, step = sender(folder, server), 0
    for _ in range(40):
        for _ in range(chance.randrange(3)):
            step += 1
            write(folder, step)
            with (folder / OUTPUT_FILE).open("a") as output:
                output.write(f"line {step}\n")
        if chance.random() < 0.3:
            mine = sender(folder, server)  # the old one was killed; this one continues from the files
        mine.step()
    mine = sender(folder, server, ended=True)
    drain(mine)
    assert server.steps == list(range(1, step + 1))
    assert server.output == "".join(f"line {number}\n" for number in range(1, step + 1))


def test_output_without_end_keeps_head_and_tail_and_says_what_is_missing(tmp_path: Path) -> None:
    """A rank that prints without end: the head is sent whole, then only the end of what waits, with a mark."""
    server, line = Server(), b"x" * 1023 + b"\n"
    (tmp_path / OUTPUT_FILE).write_bytes(line * (OUTPUT_HEAD_BYTES // 1024))
    mine = sender(tmp_path, server)
    while mine.step():
        pass
    with (tmp_path / OUTPUT_FILE).open("ab") as output:
        output.write(line * 4096 + b"the end\n")
    mine.ended.set()
    drain(mine)
    assert "bytes of output left out]" in server.output and server.output.endswith("the end\n")
    assert len(server.output) < OUTPUT_HEAD_BYTES + 2**20


def test_a_progress_bar_keeps_its_last_state() -> None:
    """Carriage returns redraw a line."""
    assert readable(b"start\n 10%\r 50%\r100%\nend\r\n") == "start\n100%\nend\n"
    assert readable(b" 10%\r 50%\r") == " 50%"


def test_a_long_line_arrives_as_one_line(tmp_path: Path) -> None:
    """A megabyte without an end: the server joins what the batches cut, and splits it its own way, once."""
    server, line = Server(), "y" * 10**6 + "é\n"
    (tmp_path / OUTPUT_FILE).write_text(line)
    drain(sender(tmp_path, server, ended=True))
    assert server.output == line and server.num_requests > 3


def test_bytes_that_are_not_text_are_shown_as_such() -> None:
    """Wrong UTF-8 and NUL neither raise nor vanish."""
    assert readable(b"a\xffb\0c") == "a�b␀c"


@given(st.text(), st.integers(0, 8))
def test_a_cut_never_halves_a_character(text: str, missing: int) -> None:
    """Whatever is taken of a settled output decodes, unless nothing else is there."""
    pending = text.encode("utf-8", "ignore").replace(b"\n", b"")
    pending = pending[: len(pending) - missing]
    taken = pending[: complete_length(pending, settled=True)]
    if len(taken) < len(pending) or len(pending) > 3:
        taken.decode()


def test_nothing_listens_is_away_and_not_an_error() -> None:
    """The sender goes on by itself when the server comes back."""
    assert ReportPost("http://127.0.0.1:9/v1/reports", "token")(b"{}") == ("away", 0)
