"""Seconds to save and to load one training state: ours beside raw files, torch.save, safetensors and torch's DCP.

    python benchmarks/checkpoint.py [--parameters 100] [--ranks 2] [--rounds 5] [--stage 3] [--folder DIR] [--out FILE]
                                    [--only saves loads background]

A state is `--parameters` million fp32 weights with both AdamW moments. All cases take turns in one process group of
gloo ranks with one thread each, and a time is that of the slowest rank, from a barrier on. Every write ends with fsync.
Before a cold read the files are read once and dropped from the page cache, before a warm one they are read once.
`growth` is the peak resident memory of the largest rank over the memory before the case. Ratios are medians over
medians of the raw case.

Note: why files are read before they are dropped. A virtual machine gives free memory back to its host, and the first
touch afterwards costs more than the reading itself. Files that were written past the page cache would pay for it in
the next reading, those written through it would not; so each case finds the pages of its own files just freed.

The engine is at stage 3, where a load ends with the rank's own bytes; at stages 0 to 2 it ends by sending every rank
all weights, which no peer's case does ("ours, stage 2" shows it). `processor` is the time that the process of the
slowest rank was given: it hardly depends on who else uses the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from checkpoint_background import measure_background
from checkpoint_cases import Bench, drop, read_through
from ranks import machine, run_ranks

PARTS = ("saves", "loads", "background")


@dataclass(frozen=True)
class Asked:
    """The command line."""

    parameters: float
    ranks: int
    rounds: int
    steps: int
    stage: int
    only: list[str]
    folder: str
    out: str


def measure_saves(bench: Bench, rounds: int) -> None:
    """Every way to save, in turns."""
    ways = {
        "raw": bench.raw_write,
        "torch": bench.torch_save,
        "safetensors": bench.safetensors_save,
        "dcp": bench.dcp_save,
        "ours": bench.our_save,
    }
    for number in range(rounds + 1):
        for name, work in ways.items():
            bench.clear(name)
            bench.time(f"save {name}", work)
        if number == 0:
            bench.cases.clear()  # the first round warms up


def measure_loads(bench: Bench, rounds: int) -> None:
    """Every way to load, cold and warm, in turns."""
    ways = {
        "raw": ("raw", bench.raw_read),
        "torch": ("torch", bench.torch_load),
        "safetensors": ("safetensors", bench.safetensors_load),
        "dcp": ("dcp", bench.dcp_load),
        "ours": ("ours", bench.our_load),
        "ours, resharded": ("other", bench.our_reshard),
        "ours, stage 2": ("ours", bench.our_load_at_stage_2),
    }
    _ = bench.gathering  # built before anything is measured
    for _ in range(rounds):
        for name, (files, work) in ways.items():
            bench.pass_over(files, drop)
            bench.time(f"load {name}, cold", work)
            bench.pass_over(files, read_through)
            bench.time(f"load {name}, warm", work)


def write_other(rank: int, asked: Asked) -> None:
    """A checkpoint by another number of ranks, for resharding."""
    bench = Bench(rank, dist.get_world_size(), Path(asked.folder), asked.parameters, stage=asked.stage)
    bench.engine.save(bench.folder / "other", step=1, fence=1)


def run_rank(rank: int, asked: Asked) -> None:
    """All measurements of one rank; rank 0 writes them down."""
    bench = Bench(rank, asked.ranks, Path(asked.folder), asked.parameters, asked.stage)
    if {"saves", "loads"} & set(asked.only):
        measure_saves(bench, asked.rounds)
    if "loads" in asked.only:
        measure_loads(bench, asked.rounds)
    background = measure_background(bench, asked.rounds, asked.steps) if "background" in asked.only else {}
    state_bytes = sum(tensor.numel() * 4 for tensor in bench.own.values())
    if rank == 0:
        found = {
            "machine": machine(),
            "asked": asdict(asked),
            "shard_bytes": state_bytes,
            "cases": {name: asdict(case) for name, case in bench.cases.items()},
            "background": background,
        }
        Path(asked.folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    bench.engine.close()


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    asked, lines = found["asked"], list[str]()
    lines.append(f"{asked['parameters']} M parameters with AdamW moments, {asked['ranks']} ranks, ")
    lines.append(f"{found['shard_bytes'] / 1e6:.0f} MB a rank, {asked['rounds']} rounds. {found['machine']}.\n")
    lines += ["| case | seconds, median | minimum | over raw | processor | over raw | growth, MB |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, case in found["cases"].items():
        median, least = statistics.median(case["seconds"]), min(case["seconds"])
        action, _, rest = name.partition(" ")
        raw = found["cases"][
            f"{action} raw{rest[rest.index(', c' if 'cold' in rest else ', w') :] if ',' in rest else ''}"
        ]
        ratio = median / statistics.median(raw["seconds"])
        given, given_raw = (statistics.median(each["processor_seconds"]) for each in (case, raw))
        growth = statistics.median(case["growth_bytes"]) / 1e6
        words = f"{median:.3f} | {least:.3f} | {ratio:.2f} | {given:.3f} | {given / given_raw:.2f} | {growth:.0f}"
        lines.append(f"| {name} | {words} |")
    lines += ["", "| in the background | seconds, median | minimum |", "|---|---|---|"]
    for name, seconds in found["background"].items():
        lines.append(f"| {name} | {statistics.median(seconds):.3f} | {min(seconds):.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=100, help="millions")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="training steps beside a background save")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="of the engine that saves and loads")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, help="loads need the saves")
    parser.add_argument("--folder", default="", help="where to write; default: a temporary folder")
    parser.add_argument("--out", default="", help="Markdown file for the tables; raw numbers beside it as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder or None, prefix="checkpoint-benchmark-") as folder:
        asked = Asked(
            given.parameters, given.ranks, given.rounds, given.steps, given.stage, given.only, folder, given.out
        )
        if "loads" in asked.only:
            run_ranks(2 * asked.ranks, write_other, asked)
        run_ranks(asked.ranks, run_rank, asked)
        found = json.loads(Path(folder, "found.json").read_text())
    found["asked"].pop("folder")
    print(table(found))
    if asked.out:
        Path(asked.out).write_text(table(found))
        Path(asked.out).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
