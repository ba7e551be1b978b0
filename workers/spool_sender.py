"""From a rank's folder to the server: the spool's records and the output's lines in numbered batches, applied once.

The rank only appends to files, so training never waits for the server, and what a killed rank wrote is still sent.
Memory is bounded by one batch; the files are the buffer.

Note: why batches are journalled before they are sent
The server applies (attempt, rank, seq) once and ignores a repeat. If a sender died after the server had applied batch
n, and its successor cut another batch n, the difference would be lost. So the end offsets of batch n are written down
first, and a successor sends exactly those bytes again.

No ray, no torch; pydantic only when the server refuses a batch.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from workers.output_tail import complete_length, readable
from workers.send_pace import between_looks, has_step, while_away

SPOOL_FILE = "spool.jsonl"  # contract.SPOOL_FILE
OUTPUT_FILE = "output.log"  # contract.OUTPUT_FILE
JOURNAL_FILE = "batches.jsonl"
BATCH_BYTES = 1 << 20
BATCH_RECORDS = 2000
RECORD_BYTES = 16 << 20  # a longer line of the spool is left out and said so
OUTPUT_BYTES = 1 << 18  # output taken per batch
OUTPUT_HEAD_BYTES = 32 << 20  # sent whole; beyond it only the end of what is waiting
OUTPUT_TAIL_BYTES = 1 << 16
SETTLE_SECONDS = 2.0  # a line without an end is sent after this
REQUEST_SECONDS = 10.0

Answer = Literal["applied", "refused", "forbidden", "away"]


@dataclass(frozen=True)
class Origin:
    """Whose reports these are."""

    attempt_id: str
    fence: int
    rank: int


@dataclass(frozen=True)
class Cut:
    """Where a batch ends in both files, and whether it is the last."""

    seq: int
    spool: int  # byte offset
    output: int
    closed: bool = False
    skipped: int = 0  # bytes of output left out before this batch's piece


class ReportPost:
    """POSTs batches over one kept connection. `url` and `token` may be changed by another thread."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.token = token
        self.last_answer = time.monotonic()  # when the server last said anything
        self._connection: http.client.HTTPConnection | None = None
        self._connected_to = ""

    def __call__(self, body: bytes) -> tuple[Answer, int]:
        """Send one batch: what became of it and the highest seq applied (0 unless applied)."""
        try:
            response = self._request(body)
            said = response.read()
        except (OSError, http.client.HTTPException):
            self._drop()
            return "away", 0
        self.last_answer = time.monotonic()
        if response.status == 200:
            return "applied", int(json.loads(said)["applied_seq"])
        if response.status in (400, 413, 422):
            return "refused", 0
        if response.status in (401, 403, 404, 410):
            return "forbidden", 0
        return "away", 0

    def _request(self, body: bytes) -> http.client.HTTPResponse:
        parts = urlsplit(self.url)
        if self._connection is None or self._connected_to != parts.netloc:
            self._drop()
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            self._connection = kind(parts.netloc, timeout=REQUEST_SECONDS)
            self._connected_to = parts.netloc
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        self._connection.request("POST", parts.path or "/", body, headers)
        return self._connection.getresponse()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class SpoolSender:
    """Sends one rank's folder until it is drained and closed. `step()` is one try; `run()` is the loop of a thread."""

    def __init__(self, folder: Path, origin: Origin, post: Callable[[bytes], tuple[Answer, int]]) -> None:
        self.folder = folder
        self.origin = origin
        self.post = post
        self.ended = threading.Event()  # the rank has ended: nothing will be appended any more
        self.closed = False  # everything was acknowledged, the last batch too
        self.given_up = False  # the server does not know this attempt or its token any more
        self._done, self._open = self._read_journal()
        self._quiet_since = time.monotonic()
        self._seen_output = 0
        self._behind = False  # the last cut left something that did not fit
        self._trains_since: float | None = None  # since a completed step was sent

    def run(self, gone: threading.Event) -> None:
        """Send until closed, given up or `gone`; the end of the rank cuts a pause short."""
        tries = 0
        while not (self.closed or self.given_up or gone.is_set()):
            answer = self.step()
            tries = tries + 1 if answer == "away" else 0
            if tries:
                gone.wait(while_away(tries))
            elif answer is None or not self._behind:
                self.ended.wait(between_looks(self._trained_seconds()))

    def step(self) -> Answer | None:
        """Cut and send at most one batch; None when there is nothing to send."""
        if self._open is None:
            self._open = self._cut()
            if self._open is None:
                return None
            self._journal(self._open)
        cut, records = self._open, self._records(self._open)
        answer, applied = self.post(self._body(cut, records))
        if answer == "refused":
            answer, applied = self.post(self._body(cut, self._mended(records)))
            if answer == "refused":  # not the records: nothing more can be done for this batch
                excuse = _event("report.refused", "the server refused a batch of reports", seq=cut.seq)
                answer, applied = self.post(self._body(cut, [excuse]))
        if answer == "applied" and applied < cut.seq:
            return "away"
        if answer == "applied":
            self._done, self._open = cut, None
            self.closed = cut.closed
            if self._trains_since is None and has_step(records):
                self._trains_since = time.monotonic()
        self.given_up = answer == "forbidden"
        return answer

    def _trained_seconds(self) -> float:
        return 0.0 if self._trains_since is None else time.monotonic() - self._trains_since

    def _cut(self) -> Cut | None:
        """The next batch's end offsets; None when there is nothing new."""
        ended = self.ended.is_set()  # read before the files: what comes after belongs to the next batch
        spool, spool_rest = self._spool_end(ended)
        output, skipped, output_rest = self._output_end(ended)
        self._behind = spool_rest or output_rest
        closed = ended and not self._behind
        if (spool, output) == (self._done.spool, self._done.output) and not closed:
            return None
        return Cut(self._done.seq + 1, spool, output, closed, skipped)

    def _spool_end(self, ended: bool) -> tuple[int, bool]:
        """(end of the whole lines that fit a batch, whether something is left behind it)."""
        start, size = self._done.spool, _size(self.folder / SPOOL_FILE)
        data = _read(self.folder / SPOOL_FILE, start, BATCH_BYTES)
        if len(data) == BATCH_BYTES and b"\n" not in data:
            data = _read(self.folder / SPOOL_FILE, start, RECORD_BYTES)
        lines = data.splitlines(keepends=True)[:BATCH_RECORDS]
        if lines and not lines[-1].endswith(b"\n") and not ended and len(data) < RECORD_BYTES:
            lines.pop()  # still being written
        end = start + sum(map(len, lines))
        return end, end < size

    def _output_end(self, ended: bool) -> tuple[int, int, bool]:
        """(end of this batch's output, bytes skipped before it, whether something is left behind it)."""
        start, size = self._done.output, _size(self.folder / OUTPUT_FILE)
        if size != self._seen_output:
            self._seen_output, self._quiet_since = size, time.monotonic()
        skipped = 0
        if start >= OUTPUT_HEAD_BYTES and size - start > 4 * OUTPUT_TAIL_BYTES:
            skipped = size - OUTPUT_TAIL_BYTES - start
        data = _read(self.folder / OUTPUT_FILE, start + skipped, OUTPUT_BYTES)
        quiet = time.monotonic() - self._quiet_since > SETTLE_SECONDS
        taken = complete_length(data, settled=ended or quiet or len(data) == OUTPUT_BYTES)
        end = start + (skipped + taken if taken else 0)
        return end, skipped if taken else 0, end < size

    def _records(self, cut: Cut) -> list[str]:
        """The records of a cut as JSON texts; the same for the same cut, but for the time of a line of output."""
        data = _read(self.folder / SPOOL_FILE, self._done.spool, cut.spool - self._done.spool)
        records = [_whole(line) for line in data.split(b"\n") if line.strip()]
        if cut.output > self._done.output:
            start = self._done.output + cut.skipped
            text = readable(_read(self.folder / OUTPUT_FILE, start, cut.output - start))
            mark = f"[{cut.skipped} bytes of output left out]\n" if cut.skipped else ""
            records.append(json.dumps({"kind": "log", "at": _now(), "stream": "stdout", "text": mark + text}))
        return records

    def _mended(self, records: list[str]) -> list[str]:
        """The records with each invalid one replaced by an event that says why."""
        from pydantic import ValidationError

        from workers.contract import RECORD

        mended = []
        for index, record in enumerate(records):
            try:
                RECORD.validate_json(record)
                mended.append(record)
            except ValidationError as error:
                said = f"record {index} was left out: {error.errors()[0]['msg']}"
                mended.append(_event("report.invalid", said, text=record[:500]))
        return mended

    def _body(self, cut: Cut, records: list[str]) -> bytes:
        head = json.dumps({**asdict(self.origin), "seq": cut.seq, "closed": cut.closed})
        return f'{head[:-1]}, "records": [{",".join(records)}]}}'.encode()

    def _journal(self, cut: Cut) -> None:
        with (self.folder / JOURNAL_FILE).open("a") as file:
            file.write(json.dumps(asdict(cut)) + "\n")

    def _read_journal(self) -> tuple[Cut, Cut | None]:
        """(last batch known to be before the open one, the open one): a predecessor's last batch is sent again."""
        cuts = [Cut(0, 0, 0)]
        path = self.folder / JOURNAL_FILE
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                cuts.append(Cut(**json.loads(line)))
            except (ValueError, TypeError):  # torn by a kill: it was not sent yet
                break
        return (cuts[-2], cuts[-1]) if len(cuts) > 1 else (cuts[0], None)


def _whole(line: bytes) -> str:
    """A line of the spool as a JSON object; an event in its place when the rank died while it was written."""
    text = line.decode("utf-8", errors="replace")
    try:
        if isinstance(json.loads(text), dict):
            return text
    except ValueError:
        return _event("report.torn", "a record was cut off when its rank ended", text=text[:500])
    return _event("report.torn", "a record is not an object", text=text[:500])


def _event(action: str, message: str, **data: Any) -> str:
    return json.dumps({"kind": "event", "at": _now(), "action": action, "message": message, "data": data})


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _read(path: Path, offset: int, count: int) -> bytes:
    if count <= 0:
        return b""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(descriptor, count, offset)
    finally:
        os.close(descriptor)
