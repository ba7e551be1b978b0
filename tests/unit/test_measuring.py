"""What a rank reports of its memory: every phase of a watched step, the peak of every sampled one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import torch

from workers.contract import RECORD, LedgerRecord, MemoryRecord
from workers.local_lines import owned_bytes
from workers.measuring import Sampler
from workers.reporter import Reporter
from zero_engine import Engine, ZeroConfig
from zero_engine.trace import PHASES

AT = datetime(2026, 1, 1, tzinfo=UTC)


def _records(folder: Path, offload: str, clock: list[float]) -> tuple[list[MemoryRecord | LedgerRecord], Engine]:
    """Four steps of a small model, sampled every ten seconds of a clock that the list gives."""
    engine = Engine(torch.nn.Linear(64, 8), ZeroConfig(micro_batches=2, offload=offload))
    reporter = Reporter(folder, clock=lambda: AT)
    sampler = Sampler(engine, reporter, 10.0, clock=lambda: clock[0])
    for step, seconds in enumerate((1.0, 1.0, 19.0, 0.0), start=1):
        clock[0] += seconds
        sampler.prepare(last=step == 4)
        for _ in engine.micro_batches():
            engine.backward(engine.module(torch.ones(2, 64)).square().mean())
        sampler.sample(step, engine.step(), always=step == 4)
    reporter.close()
    lines = (folder / "spool.jsonl").read_text().splitlines()
    records = [RECORD.validate_json(line) for line in lines]
    return [record for record in records if isinstance(record, MemoryRecord | LedgerRecord)], engine


def test_phases_are_reported_at_the_first_and_the_last_step_and_the_peak_when_it_is_time(tmp_path: Path) -> None:
    """Step 2 comes too early for anything, step 3 has a peak with the activations last seen, steps 1 and 4 have all."""
    records, engine = _records(tmp_path, "none", [100.0])
    memory = [record for record in records if isinstance(record, MemoryRecord)]
    phases = {step: [record.phase for record in memory if record.step == step] for step in (1, 2, 3, 4)}
    assert phases == {1: [*PHASES, "peak"], 2: [], 3: ["peak"], 4: [*PHASES, "peak"]}
    owned = engine.plan.memory[0]
    assert all(owned_bytes(record) == owned for record in memory)
    peaks = {record.step: record.activations for record in memory if record.phase == "peak"}
    assert peaks[1] == peaks[3] == max(record.activations for record in memory if record.step == 1) > 0
    assert all(record.rss > 0 for record in memory if record.phase == "peak")
    ledgers = [record for record in records if isinstance(record, LedgerRecord)]
    assert [record.step for record in ledgers] == [1, 3, 4]
    assert {f"phase/{phase}" for phase in (*PHASES, "hidden")} <= set(ledgers[0].seconds)
    engine.close()


def test_what_an_offloaded_update_holds_is_reported_as_pinned(tmp_path: Path) -> None:
    """Under the plan's own names, in every phase."""
    records, engine = _records(tmp_path, "cpu", [0.0])
    memory = [record for record in records if isinstance(record, MemoryRecord)]
    assert all(record.pinned > 0 and record.moments == 0 for record in memory)
    assert all(owned_bytes(record) == engine.plan.memory[0] for record in memory)
    engine.close()
