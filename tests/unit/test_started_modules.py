"""Processes of ours are ours, in whatever folder a person stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STARTED = re.compile(r'"-m",')


def test_a_module_that_we_start_is_never_looked_for_in_the_current_folder() -> None:
    """`python -m` puts that folder first on the path, and `server` and `workers` are names that other projects have."""
    files = [path for package in ("server", "workers", "zero_engine") for path in (ROOT / package).rglob("*.py")]
    found = [(path.name, text[: match.start()]) for path in files for text in [path.read_text()]
             for match in STARTED.finditer(text)]  # fmt: skip
    assert len(found) >= 7
    assert [name for name, before in found if not before.rstrip().endswith('"-P",')] == []


def test_a_command_works_in_a_project_whose_packages_have_our_names(tmp_path: Path) -> None:
    """Such a project raises when its package is imported in our place; the user's own model is still built."""
    for package in ("server", "workers", "zero_engine"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('the wrong package')\n")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text("from torch import nn\n\ndef build():\n    return nn.Linear(64, 10)\n")
    model = "{kind: python, entry: 'mine:build', path: code}"
    (tmp_path / "spec.yaml").write_text(f"name: x\nmodel: {model}\ndata: {{kind: digits}}\ntrain: {{steps: 1}}\n")
    command = [Path(sys.executable).with_name("shardyard"), "plan", "spec.yaml", "--json"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0 and '"parameters": 650' in run.stdout, run.stderr
