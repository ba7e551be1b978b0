"""`run` and `doctor`: programs with torch in them, so each is a process of its own in place of this one."""

from __future__ import annotations

import os
import sys

import typer


def run(context: typer.Context) -> None:
    """Train a spec on this machine, with no server: shardyard run SPEC [--ranks N] [--set zero.stage=3] [--json]."""
    _become("workers.local", context.args)


def doctor(context: typer.Context) -> None:
    """Check Python, torch, Ray, ports, disk, database and store, and say how to mend what fails."""
    _become("workers.doctor", context.args)


def _become(module: str, arguments: list[str]) -> None:
    """Replace this process: output, signals and exit code are then the program's own, with nothing in between."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
