"""Schedule, failures, reports and lines of a run: the pure parts of a rank's life."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from workers.contract import RECORD, EventRecord, LedgerRecord, MemoryRecord, PlanRecord, PointsRecord, ResultRecord
from workers.data.errors import DataError
from workers.failures import code_of, error_info
from workers.local_display import described, ended
from workers.local_lines import Lines, StepLine
from workers.models.python import EntryError
from workers.planner import Where, plan_spec
from workers.reporter import DIGEST_ACTION, Reporter
from workers.schedule import learning_rate
from workers.spec import TrainSpec, load_spec
from workers.step_time import Calibration
from zero_engine.errors import PeerError
from zero_engine.store import StoreFull

AT = datetime(2026, 1, 1, tzinfo=UTC)


def train_of(fields: str) -> TrainSpec:
    return load_spec(f"name: x\nmodel: {{kind: gpt}}\ndata: {{kind: text}}\ntrain: {{{fields}}}\n").train


def test_the_rate_rises_to_its_peak_and_falls_to_its_floor() -> None:
    """Property: linear to the peak at the last warm-up step, then never rising, the floor from the last step on."""
    train = train_of("steps: 100, optimizer: {lr: 1.0}, schedule: {kind: cosine, warmup_steps: 10, min_lr: 0.1}")
    rates = [learning_rate(train, completed) for completed in range(100)]
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.1) and learning_rate(train, 500) == pytest.approx(0.1)
    assert rates[54] == pytest.approx(0.55)  # half-way


@pytest.mark.parametrize("fields", ["steps: 5, schedule: {kind: cosine, warmup_steps: 10}", "steps: 1"])
def test_a_run_shorter_than_its_warm_up_never_leaves_it(fields: str) -> None:
    """Property: no division by zero, no rate above the peak."""
    train = train_of(fields)
    assert all(0 < learning_rate(train, n) <= train.optimizer.lr for n in range(train.steps))


def test_a_constant_rate_is_constant() -> None:
    """Property: the optimizer's rate at every step."""
    train = train_of("steps: 9, schedule: {kind: constant}")
    assert {learning_rate(train, n) for n in range(9)} == {3.0e-4}


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_failures_are_classified_by_type() -> None:
    """Property: the codes of the server's table; what is nobody's type is the user's; words decide nothing."""
    import torch

    assert code_of(DataError("x")) == "data_invalid"
    assert code_of(EntryError("x")) == "entry_failed"
    assert code_of(PeerError("x")) == "peer_lost"
    assert code_of(StoreFull("x")) == "storage_failed"
    assert code_of(MemoryError()) == code_of(torch.OutOfMemoryError("x")) == "out_of_memory"
    assert code_of(raised(RuntimeError("CUDA out of memory, connection closed by peer"))) is None
    assert code_of(raised(ValueError("x"))) is None


def test_an_error_is_told_whole_and_storable() -> None:
    """Property: type, message and traceback in any script, without what cannot be stored; a long one keeps its end."""

    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError

    info = error_info(raised(ValueError("世界 \0 \ud800")))
    assert info.type == "ValueError" and "\0" not in info.message and info.message.startswith("世界")
    assert "raised\n    raise error" in info.traceback
    info.model_dump_json().encode()
    assert error_info(raised(Odd())).message == "Odd"
    long = error_info(raised(ValueError("x" * 200_000)))
    assert len(long.message) == 4000 and len(long.traceback) <= 60_001


def test_a_spool_holds_one_record_a_line_and_the_result_is_a_file_too(tmp_path: Path) -> None:
    """Property: every line parses as it was given, NaN included; the result file is equal to the last line."""
    reporter = Reporter(tmp_path, clock=lambda: AT)
    reporter.phase("started")
    reporter.points(3, {"loss": math.nan, "lr": 0.1})
    reporter.event("run.note", "two\nlines", value=math.inf)
    reporter.result(ResultRecord(at=AT, outcome="finished", step=3, digest="0" * 16))
    reporter.close()
    lines = (tmp_path / "spool.jsonl").read_text().splitlines()
    records = [RECORD.validate_json(line) for line in lines]
    assert [record.kind for record in records] == ["phase", "points", "event", "result"]
    points = records[1]
    assert isinstance(points, PointsRecord) and math.isnan(points.values["loss"])
    assert json.loads(lines[1])["values"]["loss"] == "NaN"
    assert ResultRecord.model_validate_json((tmp_path / "result.json").read_text()) == records[3]
    assert not list(tmp_path.glob(".*"))


def records_of(step: int, ranks: int) -> list[tuple[int, Any]]:
    found: list[tuple[int, Any]] = [
        (0, EventRecord(at=AT, action=DIGEST_ACTION, message="", data={"step": step, "digest": f"d{step}"}))
    ]
    for rank in range(ranks):
        found.append((rank, MemoryRecord(at=AT, step=step, params=100 * (rank + 1), moments=8, rss=1000 + step)))
        found.append((rank, LedgerRecord(at=AT, step=step, bytes={"exchange/gradients": 10 + rank}, seconds={})))
    values = {"loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "seconds": 0.5, "tokens_per_second": 8.0, "eval_loss": 3.0}
    return [*found, (0, PointsRecord(at=AT, step=step, values=values))]


def test_a_step_becomes_one_line_when_every_rank_has_spoken() -> None:
    """Property: bytes of all ranks, memory of the largest, whatever the order in which the ranks are heard."""
    expected = StepLine(
        1, 2.0, 1.0, 0.1, 4, 0.5, 21, {"parameters": 200, "gradients": 0, "sums": 0, "master": 0, "moments": 8,
        "buckets": 0, "slots": 0, "other": 0}, 2, "d1", 3.0,
    )  # fmt: skip
    records = records_of(1, 2)
    for order in (records, [records[0], records[5], *records[3:5], *records[1:3]]):
        lines = Lines(2, chunk=2)
        made = [line for rank, record in order if (line := lines.take(rank, record)) is not None]
        assert made == [expected]


def test_a_step_is_told_in_what_its_data_are_counted_in() -> None:
    """Property: images are samples, text is tokens."""
    lines = Lines(1, chunk=2)
    (line,) = [found for rank, record in records_of(1, 1) if (found := lines.take(rank, record)) is not None]
    short = "name: x\nmodel: {kind: MODEL}\ndata: {kind: DATA}\ntrain: {steps: 1}\n"
    counted = {
        data: load_spec(short.replace("MODEL", model).replace("DATA", data)).counts
        for model, data in (("mlp", "digits"), ("gpt", "text"))
    }
    assert counted == {"digits": "samples", "text": "tokens"}
    assert described(line, counted["digits"]).endswith("  8 samples/s")


def test_a_summary_puts_the_plan_beside_what_was_measured() -> None:
    """Property: plan, memory and ledger rank by rank; the loss before step 1; compact JSON without NaN."""
    lines = Lines(2, chunk=2)
    lines.take(0, PlanRecord(at=AT, memory=[{"a": 1}] * 2, traffic=[{"b": 2}] * 2, parameters=7, stage=3, chunk=2))
    lines.take(0, PointsRecord(at=AT, step=0, values={"eval_loss": math.nan}))
    for step in (1, 2):
        for rank, record in records_of(step, 2):
            lines.take(rank, record)
    summary = lines.summary("finished", "abc")
    json.dumps(summary, allow_nan=False)
    assert summary["plan"] == {"memory_bytes": [{"a": 1}] * 2, "traffic_bytes": [{"b": 2}] * 2}
    assert summary["ledger_bytes"] == [{"exchange/gradients": 10}, {"exchange/gradients": 11}]
    assert (summary["eval_loss_before"], summary["eval_loss"], summary["step"]) == ("NaN", 3.0, 2)
    assert (summary["seconds"], summary["tokens"], summary["peak_rss_bytes"]) == (1.0, 8, [1002, 1002])
    assert summary["step_seconds"] == {"measured": 0.5, "predicted": None, "error": None}


def test_a_summary_says_how_far_off_the_predicted_step_was() -> None:
    """Property: the median of the steps, the plan of the run's own stage, and predicted / measured - 1."""
    rates = Calibration(
        device="cpu",
        hardware="h",
        torch="2",
        cores=2,
        threads=1,
        matmul_flops=1e9,
        attention_flops=1e9,
        activation_bytes=1e9,
        memory_bytes=1e9,
        norm_elements=1e9,
        exchange_bytes=1e9,
    )
    spec = load_spec("name: x\nmodel: {kind: mlp}\ndata: {kind: digits}\ntrain: {steps: 2}\n")
    lines = Lines(2, chunk=2, predicted=plan_spec(spec, Where(rates=rates), ranks=2).stages[3])
    for rank, record in records_of(1, 2):
        lines.take(rank, record)
    found = lines.summary("finished", "abc")["step_seconds"]
    assert found["measured"] == 0.5 and found["predicted"]["total"] > 0
    assert found["error"] == pytest.approx(found["predicted"]["total"] / 0.5 - 1)
    assert "predicted" in ended(lines.summary("finished", "abc"))
