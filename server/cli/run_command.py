"""`run`: a program with torch in it, so a process of its own in place of this one."""

from __future__ import annotations

import os
import sys

import typer


def run(context: typer.Context) -> None:
    """Train a spec on this machine, with no server: shardyard run SPEC [--ranks N] [--set zero.stage=3] [--json]."""
    sys.stdout.flush()
    # The program takes this process's place: output, signals and exit code are its own, with nothing in between.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "workers.local", *context.args])
