"""The checkpoint files of one job, as the controller handles them: find what no report told of, remove, sweep.

All of it may be killed at any point and called again. It blocks: call it in a thread, never inside a session.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime

from server.rows.readings import GONE
from server.whole_store import WholeStore
from workers.contract import CheckpointRecord, ShardRecord, eval_loss_of
from zero_engine import catalog
from zero_engine.manifest import CheckpointError, Manifest, NotPublished, parse_folder
from zero_engine.store import Store, StoreAway


def unreported(store: Store, known: Collection[str]) -> list[CheckpointRecord]:
    """Published checkpoints whose folders are not in `known`, oldest first; one that cannot be read is left out."""
    found = []
    for name in reversed(catalog.list_checkpoints(store)):
        if name.folder in known:
            continue
        try:
            found.append(_record(catalog.read_manifest(store, name.folder)))
        except CheckpointError:
            continue  # damaged before anybody knew of it: it was never offered and never will be
    return found


def require(store: Store, whole: WholeStore) -> None:
    """A disk that is not mounted looks as if every file were lost: then nothing may be judged. Raises StoreAway.

    Every job that was launched has a card in its store. Without any file there the job is gone only if the store as a
    whole is there.
    """
    if next(iter(store.list()), None) is None and not whole.is_there():
        raise StoreAway(f"there is nothing in {store.url}; is it mounted?")


def is_gone(store: Store, folder: str, whole: WholeStore) -> bool:
    """Whether a published checkpoint is not there any more. Raises StoreError, also when that cannot be judged."""
    if catalog.is_published(store, folder):
        return False
    require(store, whole)
    return True


def verify(store: Store, folder: str, whole: WholeStore) -> catalog.Verification:
    """Read every byte of a published checkpoint and compare. Raises StoreError, also when nothing is in sight."""
    if is_gone(store, folder, whole):
        return catalog.Verification(folder, (catalog.Damage(GONE),), 0)
    found = catalog.verify(store, folder)
    if not found.ok:
        require(store, whole)
    return found


def read_manifest(store: Store, folder: str, whole: WholeStore) -> Manifest:
    """The manifest of a published checkpoint. Raises CheckpointError; StoreError, also when nothing is in sight."""
    if is_gone(store, folder, whole):
        raise NotPublished(f"{folder}: {GONE}")
    try:
        return catalog.read_manifest(store, folder)
    except CheckpointError:
        require(store, whole)
        raise


def remove(store: Store, folder: str, whole: WholeStore) -> None:
    """Remove one checkpoint, whole or what is left of it. Raises StoreError, also when nothing of the job is there."""
    require(store, whole)
    catalog.delete(store, folder)


def sweep(store: Store, running_fence: int) -> list[str]:
    """Remove saves that ended attempts never finished and deletions cut short; returns their folders."""
    dead = list(catalog.unfinished(store, running_fence))
    for folder in dead:
        catalog.delete(store, folder)
    return dead


def remove_all(store: Store) -> None:
    """Remove everything below a job's store."""
    for folder in store.folders():
        if parse_folder(folder) is not None:
            catalog.delete(store, folder)
    for key in list(store.list()):
        store.delete(key)


def _record(manifest: Manifest) -> CheckpointRecord:
    return CheckpointRecord(
        at=_created(manifest.created),
        step=manifest.step,
        folder=manifest.folder,
        digest=manifest.digest,
        ranks=manifest.ranks,
        stage=manifest.stage,
        shards=[
            ShardRecord(rank=shard.rank, file=shard.file, bytes=shard.file_bytes, checksum=shard.checksum)
            for shard in manifest.shards
        ],
        seconds=0.0,
        eval_loss=eval_loss_of(manifest.progress.extra),
    )


def _created(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return datetime.now(UTC)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
