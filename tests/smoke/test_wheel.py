"""The distribution: a wheel holds the dashboard and everything the service reads, or is not built."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.running_service import RUN_SECONDS

SOURCES = ("server", "workers", "zero_engine", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE")


@pytest.fixture
def source(root: Path, tmp_path: Path) -> Path:
    """A copy of what a wheel is built from, without a dashboard."""
    target = tmp_path / "source"
    target.mkdir()
    for name in SOURCES:
        if (root / name).is_dir():
            shutil.copytree(root / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "static"))
        else:
            shutil.copy(root / name, target / name)
    return target


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS)


def test_a_wheel_without_the_built_dashboard_is_refused(source: Path, tmp_path: Path) -> None:
    """Else `pip install shardyard` would give a server without pages."""
    run = build(source, tmp_path / "out")
    assert run.returncode != 0 and "make web" in run.stdout + run.stderr
    assert not list((tmp_path / "out").glob("*.whl"))


def test_a_wheel_holds_the_dashboard_the_migrations_and_the_console_script(source: Path, tmp_path: Path) -> None:
    """What git ignores (the built pages) is in; tests and examples are not."""
    (source / "server/static/assets").mkdir(parents=True)
    (source / "server/static/index.html").write_text("<!doctype html>")
    (source / "server/static/assets/app.js").write_text("1")
    run = build(source, tmp_path / "out")
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,) = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry,) = [name for name in names if name.endswith("entry_points.txt")]
        assert "shardyard = server.cli:main" in archive.read(entry).decode()
    modules = {str(path.relative_to(source)) for path in source.rglob("*.py") if path.name != "hatch_build.py"}
    assert modules | {"server/static/index.html", "server/static/assets/app.js"} <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"server", "workers", "zero_engine"}
