"""`make demo` with a job of seconds: not on a terminal it ends by itself, with 0, and leaves no process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.running_service import processes_naming
from tests.smoke.conftest import digits_spec


def demo(root: Path, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    spec = tmp_path / "spec.yaml"
    spec.write_text(digits_spec("demo", steps=40))
    command = [sys.executable, "examples/demo.py", "--spec", str(spec), "--data-dir", str(tmp_path / "data"), *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)


def test_the_demo_trains_checks_and_leaves_nothing_behind(root: Path, tmp_path: Path) -> None:
    """Its last words are what the job learned; a second run on the same folder works as the first."""
    run = demo(root, tmp_path, "--least-drop", "0.3")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Validation loss" in run.stdout and "digest" in run.stdout
    assert processes_naming(tmp_path) == []


def test_a_demo_that_learned_too_little_says_so_and_fails(root: Path, tmp_path: Path) -> None:
    """The check can fail: nobody's loss falls by 100 nats."""
    run = demo(root, tmp_path, "--least-drop", "100")
    assert run.returncode == 1 and "less than the 100.0 nats" in run.stdout, run.stdout + run.stderr
    assert processes_naming(tmp_path) == []
