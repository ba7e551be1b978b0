"""Checkpoints of an attempt: saved by all ranks, told by rank 0, the oldest removed where nobody else does so."""

from __future__ import annotations

import time

from workers.contract import CheckpointRecord, LaunchOrder, ShardRecord
from workers.data.batches import Data
from workers.object_store import open_store
from workers.reporter import Reporter
from workers.restoring import SKIPPED, Progressed
from workers.training import NoSaving, Saving
from zero_engine import Engine
from zero_engine.catalog import delete, list_checkpoints
from zero_engine.manifest import CheckpointError, Manifest, Progress, checksum_of, folder_name
from zero_engine.store import StoreError

TOKENIZER_FILE = "tokenizer.json"  # in the checkpoint's folder


class StoreSaving:
    """Synchronous saves into the job's store under the attempt's fence."""

    def __init__(self, order: LaunchOrder, engine: Engine, data: Data, reporter: Reporter) -> None:
        self._order, self._engine, self._data, self._reporter = order, engine, data, reporter
        self._store = open_store(order.store_url)
        self._tokenizer = data.tokenizer.read_bytes() if data.tokenizer else b""

    def save(self, progressed: Progressed, eval_loss: float | None, *, must: bool) -> None:
        """Save the state. A save that fails is an event; with `must`, it raises CheckpointError."""
        step = progressed.completed
        self._reporter.phase("saving")
        begun = time.monotonic()
        self._put_tokenizer(step)
        try:
            manifest = self._engine.save(self._store, step, self._order.fence, self._progress(progressed))
        except CheckpointError as error:
            if must:
                raise
            if self._order.rank == 0:
                self._reporter.event("checkpoint.failed", f"step {step} was not saved: {error}", step=step)
        else:
            if self._order.rank == 0:
                self._tell(manifest, time.monotonic() - begun, eval_loss)
                self._remove_oldest()
        self._reporter.phase("training")

    def _put_tokenizer(self, step: int) -> None:
        """Beside the shards, before the manifest: what turns text into a model's tokens goes where its weights go."""
        if self._tokenizer and self._order.rank == 0:
            try:
                self._store.put(f"{folder_name(step, self._order.fence)}/{TOKENIZER_FILE}", self._tokenizer)
            except StoreError as error:  # the others are on their way into the save, which will meet the same store
                self._reporter.event("checkpoint.no_tokenizer", f"the tokenizer was not stored: {error}", step=step)

    def _progress(self, progressed: Progressed) -> Progress:
        train = self._order.spec.train
        return Progress(
            data_cursor=progressed.completed * train.global_batch,
            data_hash=self._data.content_hash,
            schedule={**train.schedule.model_dump(mode="json"), "steps": train.steps},
            tokenizer=checksum_of(self._tokenizer) if self._tokenizer else "",
            extra={SKIPPED: progressed.skipped},
        )

    def _tell(self, manifest: Manifest, seconds: float, eval_loss: float | None) -> None:
        shards = [
            ShardRecord(rank=shard.rank, file=shard.file, bytes=shard.file_bytes, checksum=shard.checksum)
            for shard in manifest.shards
        ]
        self._reporter.add(
            CheckpointRecord(
                at=self._reporter.time(),
                step=manifest.step,
                folder=manifest.folder,
                digest=manifest.digest,
                ranks=manifest.ranks,
                stage=manifest.stage,
                shards=shards,
                seconds=seconds,
                eval_loss=eval_loss,
            )
        )

    def _remove_oldest(self) -> None:
        if not self._order.retains:
            return
        loaded = self._engine.loaded
        damaged = {refused.folder for refused in loaded.refused} if loaded else set()
        try:
            usable = [name.folder for name in list_checkpoints(self._store) if name.folder not in damaged]
            for folder in usable[self._order.spec.checkpoint.keep_latest :]:
                delete(self._store, folder)
        except StoreError as error:
            self._reporter.event("checkpoint.kept", f"an old checkpoint was not removed: {error}")


def saving_of(order: LaunchOrder, engine: Engine, data: Data, reporter: Reporter) -> Saving:
    """Into the order's store; nowhere when it names none."""
    return StoreSaving(order, engine, data, reporter) if order.store_url else NoSaving()
