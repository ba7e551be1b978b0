"""Where a run on this machine begins: at step 0, or at the newest checkpoint of the same run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workers.contract import ResumeFrom
from workers.resume_rules import changes_between, changes_from
from workers.spec import JobSpec, SpecError, load_spec

if TYPE_CHECKING:
    from zero_engine.catalog import CheckpointName
    from zero_engine.manifest import Manifest
    from zero_engine.store import Store

SPEC_FILE = "spec.json"  # beside the checkpoints of a run: what it began with


class BadInputError(Exception):
    """Something on the command line that has to be changed; one sentence."""


@dataclass(frozen=True)
class Start:
    """What the ranks are told of it."""

    fence: int
    chunk: int
    resume: ResumeFrom | None


def start_of(spec: JobSpec, checkpoints: Path | None, *, resume: bool) -> Start:
    """Where the run begins: a resume keeps the chunk of the checkpoint, and what the rules say. Removes what ended runs
    left half saved.

    Raises BadInputError.
    """
    if checkpoints is None:
        return Start(1, spec.chunk, None)
    from zero_engine.catalog import delete, list_checkpoints, next_fence, unfinished
    from zero_engine.store import LocalStore, StoreDenied, StoreError, require_writable

    if resume and not checkpoints.is_dir():
        raise BadInputError(
            f"--checkpoints {checkpoints}: there is no such folder to resume from; name the one of the run, or "
            "leave out --resume to begin"
        )
    store = LocalStore(checkpoints)
    try:
        require_writable(store)
    except StoreDenied as error:
        raise BadInputError(f"--checkpoints {checkpoints}: {error}") from error
    known, fence = list_checkpoints(store), next_fence(store)
    if not resume:
        if known:
            raise BadInputError(f"{checkpoints} holds checkpoints: add --resume to go on, or name an empty folder")
        _keep_spec(store, spec)
        return Start(fence, spec.chunk, None)
    manifest = _newest_readable(store, known)
    if manifest is None:
        raise BadInputError(f"{checkpoints} holds no checkpoint {'that can be read' if known else 'to resume from'}")
    _require_the_same_run(checkpoints, _kept_spec(store), manifest, spec)
    try:
        for folder in unfinished(store, fence):
            delete(store, folder)
    except StoreError as error:
        raise BadInputError(f"{checkpoints}: what an ended run left half saved stays: {error}") from error
    chunk = manifest.arithmetic.chunk
    return Start(fence, chunk, ResumeFrom(checkpoint=known[0].folder, step=known[0].step))


def _newest_readable(store: Store, known: Sequence[CheckpointName]) -> Manifest | None:
    """The manifest of the newest that has a whole one: the ranks pass over the others too."""
    from zero_engine.catalog import read_manifest
    from zero_engine.manifest import CheckpointError

    for name in known:
        with contextlib.suppress(CheckpointError):
            return read_manifest(store, name.folder)
    return None


def _require_the_same_run(folder: Path, kept: JobSpec | None, manifest: Manifest, spec: JobSpec) -> None:
    """Raises BadInputError by field for what only another run can have. `kept`: the spec that the run began with."""
    found = changes_from(manifest, spec) if kept is None else changes_between(kept, spec)
    if found:
        raise BadInputError(
            f"{'; '.join(map(str, found))} ({folder}). A resume may change the ranks, zero and train.steps: keep this "
            "as it was, or begin another run with another folder in --checkpoints. A job of a server can be forked "
            "with such a change: shardyard fork CHECKPOINT --set FIELD=VALUE"
        )


def _keep_spec(store: Store, spec: JobSpec) -> None:
    """Beside the checkpoints to come. A disk that is full now may take them when they come."""
    from zero_engine.store import StoreError

    with contextlib.suppress(StoreError):
        store.put(SPEC_FILE, spec.model_dump_json(indent=1).encode())


def _kept_spec(store: Store) -> JobSpec | None:
    """What the run began with; None where that was not kept, or is no spec of this version."""
    from zero_engine.store import StoreError

    try:
        return load_spec(store.get(SPEC_FILE))
    except (StoreError, SpecError):
        return None
