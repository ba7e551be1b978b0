"""The folders of ranks on a node's disk: kept for a while after their attempt was released, then removed.

A folder is `<ranks>/<attempt>/<rank>`. What it holds is in the database by then, and on its own machine the controller
removes it; on other nodes, and of attempts that could not say everything, the newest few stay for whoever looks into a
failure. Only folders that were marked as released are ever removed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

RELEASED_FILE = "released"
KEPT_ATTEMPTS = 20


def mark_released(folder: Path) -> None:
    """Nothing of this rank is left and nobody will ask for its files; a folder that is gone stays gone."""
    if folder.is_dir():
        (folder / RELEASED_FILE).touch()


def prune(ranks: Path, keep: int = KEPT_ATTEMPTS) -> list[Path]:
    """Remove all released attempts below this folder but the newest `keep`; returns those removed."""
    released = [attempt for attempt in ranks.iterdir() if _is_released(attempt)] if ranks.is_dir() else []
    released.sort(key=lambda attempt: attempt.stat().st_mtime, reverse=True)
    for attempt in released[keep:]:
        shutil.rmtree(attempt, ignore_errors=True)  # another agent on a shared disk may be at it too
    return released[keep:]


def _is_released(attempt: Path) -> bool:
    """Whether this is an attempt's folder and every rank in it was released."""
    if not attempt.is_dir() or attempt.is_symlink():
        return False
    inside = list(attempt.iterdir())
    return bool(inside) and all(rank.name.isdigit() and (rank / RELEASED_FILE).exists() for rank in inside)
