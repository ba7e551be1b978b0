"""A resume: the checkpoint asked for, or the newest one before it that verifies, and what a person should know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.contract import LaunchOrder, ResumeFrom
from workers.data.batches import Data
from workers.object_store import open_store
from workers.reporter import Reporter
from zero_engine import Engine
from zero_engine.checkpoint import NoneUsable, Refused
from zero_engine.store import Store, StoreError

SKIPPED = "skipped_steps"  # in a checkpoint's progress


class RestoreError(Exception):
    """No checkpoint can be used."""


class OtherDataError(Exception):
    """The checkpoint was trained on other data."""


@dataclass(frozen=True)
class Progressed:
    """How far a run has come."""

    completed: int = 0  # steps, skipped ones included
    skipped: int = 0  # of them, without an update


def restore(order: LaunchOrder, resume: ResumeFrom, engine: Engine, data: Data, reporter: Reporter) -> Progressed:
    """Load the state and say how far it is; a collective call.

    Raises RestoreError when no checkpoint can be used, OtherDataError when the one that loads belongs to other data.
    """
    store = open_store(resume.store_url or order.store_url)
    try:
        loaded = engine.restore(store, folder=resume.checkpoint)
    except NoneUsable as error:
        if order.rank == 0:
            _tell_refused(error.refused, reporter, store_is_there=_is_there(store))
        raise RestoreError(str(error)) from error
    manifest = loaded.manifest
    if order.rank == 0:
        _tell_refused(loaded.refused, reporter, store_is_there=True)
        if loaded.refused:
            message = f"{manifest.folder} was used in place of {resume.checkpoint}"
            reporter.event("checkpoint.fallback", message, folder=manifest.folder, step=manifest.step)
        if loaded.changes:
            message = "bits may differ from an uninterrupted run: " + "; ".join(loaded.changes)
            reporter.event("resume.changed", message, changes=list(loaded.changes))
    stored = manifest.progress.data_hash
    if stored and stored != data.content_hash:
        raise OtherDataError(
            f"{manifest.folder} was trained on data {stored[:12]}…, this spec gives {data.content_hash[:12]}…; "
            "resume with the same text and tokenizer, or start a new job"
        )
    return Progressed(manifest.step, int(manifest.progress.extra.get(SKIPPED, 0)))


def _is_there(store: Store) -> bool:
    """Whether anything of the job is in sight, if only its card: a disk that is not mounted looks empty."""
    try:
        return next(iter(store.list()), None) is not None
    except StoreError:
        return False


def _tell_refused(refused: Sequence[Refused], reporter: Reporter, *, store_is_there: bool) -> None:
    """An event for each. Damaged is what was read and found wrong, or is gone from a store that is there."""
    for each in refused:
        damaged = each.fault == "damaged" or (each.fault == "missing" and store_is_there)
        message = f"{each.folder} cannot be used: {each.reason}"
        reporter.event("checkpoint.refused", message, folder=each.folder, damaged=damaged)
