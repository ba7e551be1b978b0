"""Checkpoints of an attempt: begun by all ranks beside training, told by rank 0 when they are published.

begin     a save that is due: training goes on, a writer process does the work (zero_engine/saver.py)
look      before each step ends: what became of saves is told, and what all ranks must know rides on the exchange
finish    the save of the last step or of a stop: it returns when the checkpoint is durable
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Literal, NoReturn

from workers.beating import Beating
from workers.contract import (
    EVAL_LOSS,
    CheckpointRecord,
    LaunchOrder,
    SaveRecord,
    ShardRecord,
    eval_loss_of,
    write_number,
)
from workers.data.batches import Data
from workers.object_store import open_store
from workers.reporter import Reporter
from workers.restoring import SKIPPED, Progressed
from workers.training import NoSaving, Saving, Word
from zero_engine import Engine
from zero_engine.catalog import CheckpointName, delete, list_checkpoints, read_manifest
from zero_engine.errors import PeerError
from zero_engine.manifest import CheckpointError, Manifest, Progress, checksum_of, folder_name
from zero_engine.saver import Saver, SaveReport
from zero_engine.store import StoreError, require_writable

TOKENIZER_FILE = "tokenizer.json"  # in the checkpoint's folder
WAITED_SECONDS = 0.1  # a wait for the save before that is worth an event


class StoreSaving:
    """Saves into the job's store under the attempt's fence."""

    def __init__(self, order: LaunchOrder, engine: Engine, data: Data, reporter: Reporter) -> None:
        self._order, self._engine, self._data, self._reporter = order, engine, data, reporter
        self._policy = order.spec.checkpoint
        self._store = open_store(order.store_url)
        self._tokenizer = data.tokenizer.read_bytes() if data.tokenizer else b""
        self._saver: Saver | None = None
        self._eval_losses: dict[int, float | None] = {}  # by step, of saves under way
        self._measured: dict[str, float | None] = {}  # validation loss by folder, where rank 0 keeps the best
        self._skipped = self._waited = 0  # saves, for the save before them
        self._failure: SaveReport | None = None  # the last one

    def prepare(self) -> None:
        """Have the writer and its memory stand before the first save needs them."""
        if self._saver is None:
            self._saver = self._engine.saver(self._store, self._order.fence)

    def look(self) -> Word:
        """Tell what became of saves, and say what the other ranks must know. Never waits."""
        if self._saver is None:
            return Word.NOTHING
        for report in self._saver.poll():
            self._hear(report)
        if self._failure is not None and self._policy.when_failed == "stop":
            return Word.SAVE_FAILED
        return Word.BUSY if self._saver.busy else Word.NOTHING

    def begin(self, progressed: Progressed, eval_loss: float | None, *, busy: bool) -> None:
        """Save the state as it is while training goes on. `busy`: on some rank the save before is still running."""
        step = progressed.completed
        if busy and self._policy.when_busy == "skip":
            self._skip(step)
            return
        self.prepare()
        assert self._saver is not None
        if self._saver.busy:
            self._wait(step, self._saver)
        self.look()  # tells of the save before first
        files = {TOKENIZER_FILE: self._tokenizer} if self._tokenizer else {}
        if self._saver.save(step, self._progress(progressed, eval_loss), files):
            self._eval_losses[step] = eval_loss
            self._say(step, "begun")

    def settle(self) -> None:
        """What failed saves left half done goes beside training."""
        if self._saver is not None:
            self._saver.settle()

    def finish(self, progressed: Progressed, eval_loss: float | None) -> None:
        """Save the state and return when it is durable; a save under way ends first. Raises CheckpointError."""
        step = progressed.completed
        self._reporter.phase("saving")
        begun = time.monotonic()
        if self._saver is not None:
            self._saver.wait()
            self.look()
        self._say(step, "begun")
        self._put_tokenizer(step)
        store = Beating(self._store, lambda: self._reporter.phase("saving"))
        manifest = self._engine.save(store, step, self._order.fence, self._progress(progressed, eval_loss))
        self._say(step, "ended")
        if self._order.rank == 0:
            self._tell(manifest, time.monotonic() - begun, {}, eval_loss)
        self._reporter.phase("training")

    def give_up(self) -> NoReturn:
        """A save failed on some rank, and the policy is to stop: raise, with the cause where it is known."""
        if self._failure is None:
            raise PeerError("a save failed on another rank, and checkpoint.when_failed is stop")
        raise CheckpointError(
            f"step {self._failure.step} was not saved: {self._failure.problem}; checkpoint.when_failed is stop"
        )

    def _hear(self, report: SaveReport) -> None:
        eval_loss = self._eval_losses.pop(report.step, None)
        self._say(report.step, "ended")
        if report.problem:
            self._failure = report
            action, whose = (
                ("failed", "") if self._order.rank == 0 else ("shard_failed", f" by rank {self._order.rank}")
            )
            message = f"step {report.step} was not saved{whose}: {report.problem}"
            self._reporter.event(f"checkpoint.{action}", message, step=report.step)
        elif report.manifest is not None:
            parts = ("blocked", "copy", "write", "publish")
            seconds_by = {part: max(0.0, getattr(report, f"{part}_seconds")) for part in parts}  # measured apart
            self._tell(report.manifest, report.total_seconds, seconds_by, eval_loss)

    def _say(self, step: int, state: Literal["begun", "ended"]) -> None:
        """What a person sees of a save while it runs."""
        if self._order.rank == 0:
            self._reporter.add(SaveRecord(at=self._reporter.time(), step=step, state=state))

    def _skip(self, step: int) -> None:
        self._skipped += 1
        if self._order.rank == 0:
            message = f"step {step} is not saved: the save before it is still running; {self._skipped} skipped so far"
            self._reporter.event("checkpoint.skipped", message, step=step, count=self._skipped)

    def _wait(self, step: int, saver: Saver) -> None:
        """The save before is still running: rank 0's ends last, so that it is the one to tell."""
        self._reporter.phase("saving")
        begun = time.monotonic()
        saver.wait()
        seconds = time.monotonic() - begun
        self._reporter.phase("training")
        if seconds > WAITED_SECONDS:
            self._waited += 1
            if self._order.rank == 0:
                message = (
                    f"training waited {seconds:.1f} s at step {step} for the save before; {self._waited} times so far"
                )
                self._reporter.event("checkpoint.waited", message, step=step, seconds=seconds, count=self._waited)

    def _put_tokenizer(self, step: int) -> None:
        """Beside the shards, before the manifest: what turns text into a model's tokens goes where its weights go."""
        if self._tokenizer and self._order.rank == 0:
            try:
                self._store.put(f"{folder_name(step, self._order.fence)}/{TOKENIZER_FILE}", self._tokenizer)
            except StoreError as error:  # the others are on their way into the save, which will meet the same store
                self._reporter.event("checkpoint.no_tokenizer", f"the tokenizer was not stored: {error}", step=step)

    def _progress(self, progressed: Progressed, eval_loss: float | None) -> Progress:
        train = self._order.spec.train
        measured = {} if eval_loss is None else {EVAL_LOSS: write_number(eval_loss)}
        return Progress(
            data_cursor=progressed.completed * train.global_batch,
            data_hash=self._data.content_hash,
            schedule={**train.schedule.model_dump(mode="json"), "steps": train.steps},
            tokenizer=checksum_of(self._tokenizer) if self._tokenizer else "",
            extra={SKIPPED: progressed.skipped, **measured},
        )

    def _tell(
        self, manifest: Manifest, seconds: float, seconds_by: Mapping[str, float], eval_loss: float | None
    ) -> None:
        """A checkpoint was published: rank 0 says so, and removes what is too old where nobody else does."""
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
                seconds_by=dict(seconds_by),
                eval_loss=eval_loss,
            )
        )
        if self._order.retains:
            self._remove_oldest()

    def _best(self, usable: Sequence[CheckpointName]) -> set[str]:
        """Folders of the best by validation loss, as their manifests have it."""
        if not self._policy.keep_best:
            return set()
        for name in usable:
            if name.folder not in self._measured:
                self._measured[name.folder] = eval_loss_of(read_manifest(self._store, name.folder).progress.extra)
        scored = [
            (loss, -name.step, name.folder) for name in usable if (loss := self._measured[name.folder]) is not None
        ]
        finite = sorted(each for each in scored if not math.isnan(each[0]))
        return {folder for _, _, folder in finite[: self._policy.keep_best]}

    def _remove_oldest(self) -> None:
        loaded = self._engine.loaded
        damaged = {refused.folder for refused in loaded.refused} if loaded else set()
        try:
            usable = [name for name in list_checkpoints(self._store) if name.folder not in damaged]
            older = usable[self._policy.keep_latest :]
            best, every = self._best(usable), self._policy.keep_every
            for name in older:
                if name.folder not in best and not (every and name.step % every == 0):
                    delete(self._store, name.folder)
        except (StoreError, CheckpointError) as error:
            self._reporter.event("checkpoint.kept", f"an old checkpoint was not removed: {error}")


def saving_of(order: LaunchOrder, engine: Engine, data: Data, reporter: Reporter) -> Saving:
    """Into the order's store; nowhere when it names none. Raises StoreDenied where a node cannot write there."""
    if not order.store_url:
        return NoSaving()
    require_writable(open_store(order.store_url))
    return StoreSaving(order, engine, data, reporter)
