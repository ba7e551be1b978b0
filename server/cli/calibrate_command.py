"""`calibrate`: what this machine reaches in ten seconds, so that plans can say how long a step should take."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Annotated, Literal

import typer

from server.cli.connection import AsJson, DataDir, data_folder
from server.cli.errors import CommandError
from server.cli.output import Output, bytes_text


def calibrate(
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Default: a GPU where there is one.")] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="For each rate.")] = 1.5,
    threads: Annotated[int, typer.Option(min=1, help="Of the rank, as resources.threads_per_rank; on a CPU.")] = 1,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Measure products, attention, memory and exchange between ranks; plans then predict step times from them.

    Run it while the machine is idle, about ten seconds; on a CPU it keeps all cores busy, as ranks do. The rates hold
    for this machine, torch build and number of threads.
    """
    command = [sys.executable, "-P", "-m", "workers.calibrate", "--data-dir", str(data_folder(data_dir))]
    command += ["--seconds", str(seconds), "--threads", str(threads), *(["--device", device] if device else [])]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        raise CommandError(f"The machine could not be measured:\n{run.stderr.strip()}")
    found = json.loads(run.stdout)
    output = Output(as_json)
    output.result(
        found,
        lambda: output.say(
            f"{found['hardware']}, torch {found['torch']}: {found['matmul_flops'] / 1e9:.1f} GFLOP/s, memory "
            f"{bytes_text(found['memory_bytes'])}/s, exchange {bytes_text(found['exchange_bytes'])}/s for one rank."
        ),
    )
