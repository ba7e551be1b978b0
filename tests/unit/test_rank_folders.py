"""Folders of released attempts: the newest stay, nothing else is ever touched."""

from __future__ import annotations

import os
from pathlib import Path

from workers.rank_folders import mark_released, prune


def attempt(ranks: Path, name: str, age: int, released: tuple[int, ...] = (0, 1)) -> Path:
    """An attempt of two ranks, `age` seconds old."""
    for rank in range(2):
        (ranks / name / str(rank)).mkdir(parents=True)
        if rank in released:
            mark_released(ranks / name / str(rank))
    os.utime(ranks / name, (1_000_000 - age, 1_000_000 - age))
    return ranks / name


def test_only_old_released_attempts_are_removed(tmp_path: Path) -> None:
    """What still runs, what is half released and what is not ours stays, however old."""
    running = attempt(tmp_path, "running", 900, released=())
    half = attempt(tmp_path, "half", 900, released=(1,))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    old = [attempt(tmp_path, f"old{age}", age) for age in (500, 400)]
    new = [attempt(tmp_path, f"new{age}", age) for age in (3, 2, 1)]
    assert set(prune(tmp_path, keep=3)) == set(old)
    assert set(tmp_path.iterdir()) == {running, half, tmp_path / "notes", *new}


def test_a_folder_that_is_not_there_is_nothing_to_prune(tmp_path: Path) -> None:
    """A node that never held a rank."""
    mark_released(tmp_path / "gone")
    assert prune(tmp_path / "gone") == []
