"""The engine without the service: the porting pages are tried as they stand, and the example under torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from tests.distributed.porting_program import MICRO_BATCHES, Net, loss_of, micro_batch

PAGES = ("docs/from_ddp.md", "docs/from_fsdp.md", "docs/from_deepspeed.md")


def _environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


def _untrained() -> float:
    torch.manual_seed(1)
    model = Net()
    with torch.no_grad():
        losses = [loss_of(model(x), y) for x, y in (micro_batch(0, index) for index in range(MICRO_BATCHES))]
    return float(torch.stack(losses).mean())


def test_the_porting_pages_run_as_they_stand_and_train_alike(root: Path, memory_path: Path) -> None:
    """Each page's diff, applied: the program after it ends where the program before it did, to rounding."""
    command = [sys.executable, "-m", "tests.distributed.porting_program"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(memory_path / "store"), *PAGES],
            cwd=root,
            env=_environment(root),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), outputs[0][1] + outputs[1][1]
    first, second = ([json.loads(line) for line in output.splitlines()] for output, _ in outputs)
    assert [line["page"] for line in first] == list(PAGES) and first == second
    start = _untrained()
    for line, tolerance in zip(first, (1e-4, 2e-2, 2e-2), strict=True):  # fp32, then two pages in bf16
        assert line["after"] < start - 0.01
        if line["before"] is not None:
            assert abs(line["after"] - line["before"]) < tolerance * start, line


def test_the_example_is_short_and_runs_under_torchrun(root: Path) -> None:
    """At most forty lines; two ranks at stage 3, each step told once, and a digest at the end."""
    example = root / "examples" / "torchrun_gpt.py"
    assert len(example.read_text().splitlines()) <= 40
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, str(example), "--stage=3", "--steps=2"]
    done = subprocess.run(command, cwd=root, env=_environment(root), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^step (\d+)  loss", done.stdout, re.MULTILINE) == ["1", "2"]
    assert len(re.findall(r"^digest [0-9a-f]{16}", done.stdout, re.MULTILINE)) == 1
