"""Saves beside training, for `checkpoint.py`: what they cost it, and what a save does meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_cases import Bench
from unchecked import Unchecked, unexamined

from zero_engine.saver import Saver, SaveReport
from zero_engine.shard import block_checksums
from zero_engine.state import block_bytes, bytes_of

FOLDERS = ("background", "background-dcp", "background-unchecked")
Begin = Callable[[], Callable[[], object]]  # begins a save; the result waits for its end
Found = dict[str, list[float]]  # seconds by case


def measure_background(bench: Bench, rounds: int, steps: int) -> Found:
    """Whole cost to training of a save in the background, and how long the training thread stood still."""
    found: Found = {}
    saver = bench.engine.saver(bench.folder / "background", fence=1)
    group, number, blocked = dist.new_group(backend="gloo"), 0, list[float]()

    def ours() -> Callable[[], object]:
        nonlocal number
        number += 1
        saver.save(number)
        return lambda: blocked.append(require(saver.finish()).blocked_seconds)

    def theirs() -> Callable[[], object]:
        future: Any = dcp.async_save(
            bench.named(bench.own), checkpoint_id=bench.folder / "background-dcp", process_group=group
        )
        return future.result

    def dcp_sync() -> Callable[[], object]:
        dcp.save(bench.named(bench.own), checkpoint_id=bench.folder / "background-dcp", process_group=group)
        return lambda: None

    ways: dict[str, Begin | None] = {"nothing": None, "ours": ours, "dcp async": theirs, "dcp": dcp_sync}
    train(bench, 1, None)
    for _ in range(rounds):
        for name, save in ways.items():
            bench.clear(*FOLDERS)
            seconds = bench.slowest(*train(bench, steps, save))
            found.setdefault(f"{name}: {steps} steps", []).append(seconds[0])
            found.setdefault(f"{name}: save call", []).append(seconds[1])
    found["ours: training stood still"] = blocked  # in the call, and before an update until the copies were done
    return found | measure_alone(bench, saver, rounds)


def train(bench: Bench, steps: int, save: Begin | None) -> tuple[float, float]:
    """Seconds of `steps` steps with a save at the first, waited for at the end; seconds that `save` blocked."""
    dist.barrier()
    begun, blocked = time.perf_counter(), 0.0
    finish: Callable[[], object] = lambda: None  # noqa: E731
    if save is not None:
        finish = save()
        blocked = time.perf_counter() - begun
    for _ in range(steps):
        bench.step()
    finish()
    return time.perf_counter() - begun, blocked


def measure_alone(bench: Bench, checked: Saver, rounds: int) -> Found:
    """A save without training beside it, in turns with one that neither hashes nor looks at what it writes."""
    found: Found = {}
    unchecked = bench.engine.saver(Unchecked(bench.folder / "background-unchecked"), fence=1)
    for number in range(rounds + 1):
        for name, saver in (("ours: save alone", checked), ("ours: save alone, unchecked", unchecked)):
            bench.clear(*FOLDERS)
            begun, given = time.perf_counter(), processor_seconds(saver)
            with patch.object(saver, "_examined", saver._examined if saver is checked else unexamined):
                saver.save(1000 + number)
                saver.hold()
                report = require(saver.finish())
            seconds = time.perf_counter() - begun, processor_seconds(saver) - given
            parts = {"": seconds[0], ", processor of a rank and its writer": seconds[1]}
            parts |= {", copy of a shard": report.copy_seconds, ", write of a shard": report.write_seconds}
            for part, slowest in zip(parts, bench.slowest(*parts.values()), strict=True):
                if number:  # the first warms up
                    found.setdefault(f"{name}{part}", []).append(slowest)
    found["ours: digest and checksums, processor"] = [check(bench) for _ in range(rounds)]
    return found


def check(bench: Bench) -> float:
    """Processor seconds of what a save computes over a shard: finite values, digest, a checksum per block."""
    subject, begun = bench.engine._subject, time.process_time()
    state = list(subject.owned())
    subject.digest_part(state, subject.scalars())
    for _, tensor in state:
        block_checksums(bytes_of(tensor), block_bytes(subject.layout, tensor))
    return time.process_time() - begun


def processor_seconds(saver: Saver) -> float:
    """Of this process and the saver's writer; the latter in hundredths."""
    words = Path(f"/proc/{saver._writer.pid}/stat").read_text().rpartition(") ")[2].split()
    return time.process_time() + (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def require(reports: list[SaveReport]) -> SaveReport:
    """The one report of a save that went well."""
    (report,) = reports
    assert not report.problem, report.problem
    return report
