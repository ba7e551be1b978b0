"""`make demo` with a job of seconds: not on a terminal it ends by itself, with 0, and leaves no process."""

from __future__ import annotations

import os
import pty
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running_service import RUN_SECONDS, processes_naming
from tests.smoke.specs import digits_spec


def command(tmp_path: Path, *words: str) -> list[str]:
    """The demo with a small job on a folder of its own."""
    spec = tmp_path / "spec.yaml"
    spec.write_text(digits_spec("demo", steps=40))
    return [sys.executable, "examples/demo.py", "--spec", str(spec), "--data-dir", str(tmp_path / "data"), *words]


def test_the_demo_trains_checks_and_leaves_nothing_behind(root: Path, tmp_path: Path) -> None:
    """Its last words are what the job learned."""
    words = command(tmp_path, "--least-drop", "0.3")
    run = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=RUN_SECONDS, stdin=subprocess.DEVNULL)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Validation loss" in run.stdout and "digest" in run.stdout
    assert processes_naming(tmp_path) == []


class Evaluated:
    """A client of a server whose job's validation loss fell from 2.5 to 1.5."""

    def get(self, path: str, **query: object) -> object:
        points = [{"step": 40, "value": 1.5}, {"step": 0, "value": 2.5}]
        return {"series": [{"branch": False, "points": points}]}


def test_a_demo_that_learned_too_little_says_so_and_fails(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The check can fail: one nat is less than 1.1 and more than 0.9."""
    check = runpy.run_path(str(root / "examples/demo.py"))["check"]
    job = {"id": "1", "status": "succeeded", "step": 40, "ranks": 2, "stage": 2, "digest": "0" * 16}
    assert check(Evaluated(), job, 0.9)
    assert not check(Evaluated(), job, 1.1)
    assert "less than the 1.1 nats" in capsys.readouterr().out
    assert not check(Evaluated(), {"status": "failed", "reason": None}, 0.0)


def test_on_a_terminal_the_dashboard_stays_up_until_ctrl_c(root: Path, tmp_path: Path) -> None:
    """It says where the dashboard is and how to stop it; Ctrl-C then ends everything, with 0."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(root)
        words = command(tmp_path, "--least-drop", "0.3")
        os.execv(words[0], words)
    said = read_until(terminal, b"Press Ctrl-C")
    assert b"/login?token=" in said
    os.write(terminal, b"\x03")
    said += read_until(terminal, None)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, said.decode(errors="replace")[-3000:]
    assert processes_naming(tmp_path) == []


def read_until(terminal: int, wanted: bytes | None) -> bytes:
    """What is printed up to `wanted`, or to the end."""
    said = b""
    while wanted is None or wanted not in said:
        try:
            said += os.read(terminal, 65536)
        except OSError:  # the other end is closed
            assert wanted is None, said.decode(errors="replace")[-3000:]
            return said
    return said
