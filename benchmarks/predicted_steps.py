"""How far a plan's step time is from the step: calibrate this machine, train the 27.4 M-parameter GPT at each stage.

    python benchmarks/predicted_steps.py [--ranks 2] [--micro-batches 2] [--steps 12]

`shardyard calibrate` and `shardyard run`, as anybody would: predicted and measured are those of the run's own summary.
Sequences of 128 tokens, 4 a micro-batch, one thread a rank. Run it on an idle machine: a busy one is not what was
calibrated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from ranks import machine

from workers.data.token_file import write_tokens

SAMPLES, CONTEXT, VOCABULARY = 4, 128, 8192


def shardyard(*arguments: str) -> str:
    """A command's standard output."""
    command = [str(Path(sys.executable).with_name("shardyard")), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout


def spec_in(folder: Path, asked: argparse.Namespace) -> Path:
    """A spec on random tokens, written down."""
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 1 << 18, dtype=np.uint32)
    write_tokens(folder / "train.bin", [ids], VOCABULARY)
    micro_batches = asked.ranks * asked.micro_batches
    spec = {
        "name": "predicted steps",
        "model": {"kind": "gpt", "layers": 6, "hidden": 512, "heads": 8, "context": CONTEXT, "tied": False},
        "data": {"kind": "tokens", "path": "train.bin"},
        "train": {
            "steps": asked.steps,
            "micro_batch": SAMPLES,
            "global_batch": SAMPLES * micro_batches,
            "eval": {"every": 0},
        },
        "resources": {"ranks": asked.ranks, "device": "cpu"},
    }
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return path


def row(stage: int, summary: dict[str, Any]) -> str:
    found = summary["step_seconds"]
    parts = found["predicted"]
    cells = [parts["compute"], parts["exchange"], parts["update"], parts["total"], found["measured"]]
    return f"| {stage} | {' | '.join(f'{1e3 * each:.0f}' for each in cells)} | {100 * found['error']:+.0f} % |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=2, help="of each rank, a step")
    parser.add_argument("--steps", type=int, default=12)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = spec_in(folder, asked)
        rates = json.loads(shardyard("calibrate", "--device", "cpu", "--data-dir", name, "--json"))
        print(
            f"# Predicted and measured steps\n\n`{Path(__file__).name}`, {asked.ranks} ranks, {asked.micro_batches} "
            f"micro-batches each of {SAMPLES} x {CONTEXT} tokens, {asked.steps} steps, {machine()}. Calibrated: "
            f"products {rates['matmul_flops'] / 1e9:.0f} and attention {rates['attention_flops'] / 1e9:.0f} GFLOP/s, "
            f"activations {rates['activation_bytes'] / 1e9:.1f}, memory {rates['memory_bytes'] / 1e9:.1f} and exchange "
            f"{rates['exchange_bytes'] / 1e9:.1f} GB/s, norm {rates['norm_elements'] / 1e9:.2f} G elements/s.\n\n"
            "| stage | compute ms | exchange ms | update ms | predicted ms | measured ms | error |\n"
            "|---|---|---|---|---|---|---|"
        )
        for stage in range(4):
            options = ["--set", f"zero.stage={stage}", "--data-dir", name, "--json"]
            lines = shardyard("run", str(spec), *options).splitlines()
            print(row(stage, json.loads(lines[-1])["summary"]), flush=True)


if __name__ == "__main__":
    main()
