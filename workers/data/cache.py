"""Prepared data of a node: made once under a lock, found again by content, shared by every job and rank. No torch.

<cache>/notes/<key>.json   what was found out about files that have not changed since (by size and times)
<cache>/notes/<key>.lock   held by the one process that finds it out
<cache>/text/<key>/        a prepared text, complete since its folder has its final name
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Note = dict[str, Any]
STALE_SECONDS = 86400.0


def files_key(files: Iterable[Path], *settings: str) -> str:
    """64 hex digits that change when a file is added, removed or written, without reading the files."""
    digest = hashlib.sha256("\0".join(settings).encode())
    for file in files:
        status = os.stat(file)
        digest.update(
            f"\0{file}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}\0{status.st_ino}".encode()
        )
    return digest.hexdigest()


def noted(cache: Path, key: str, find_out: Callable[[], Note], still_true: Callable[[Note], bool]) -> Note:
    """What `find_out` said for this key, asked once per node: whoever comes later waits and reads its answer."""
    path = cache / "notes" / f"{key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        note = _read(path)
        if note is None or not still_true(note):
            note = find_out()
            _write(path, note)
    return note


def published(folder: Path, fill: Callable[[Path], None]) -> Path:
    """The folder, filled by `fill` beside its place and renamed when complete. An existing one is left as it is."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale_drafts(folder.parent)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    try:
        fill(draft)
        os.rename(draft, folder)
    except OSError:
        if not folder.is_dir():  # another one that found the same content under other names may have been faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _remove_stale_drafts(folder: Path) -> None:
    """What processes killed in the middle left behind, once nobody can be working on it any more."""
    for draft in folder.glob(".draft-*"):
        if time.time() - draft.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by the kernel when the process dies
        yield


def _read(path: Path) -> Note | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write(path: Path, note: Note) -> None:
    draft = path.with_suffix(f".draft-{os.getpid()}")
    draft.write_text(json.dumps(note))
    os.replace(draft, path)
