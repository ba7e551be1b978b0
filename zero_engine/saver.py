"""Saving while training goes on: copy during the next forward and backward, write in another process.

    save      scalars and buffers are copied at once; a thread copies masters and moments, which nobody changes before
              the next update (tensor copies release the interpreter lock)
    hold      called before the update: waits for the copies, and for nothing else
    writer    a process hashes, writes and syncs from the shared copy (writer.py); ranks meet in the store alone
    thread    it looks at the copy meanwhile: finite values, digest; what it finds decides whether the shard stays

The copy stands in one reused piece of shared memory, one shard large. A save that is due while the last one is still
running follows the policy: wait for it, or skip.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from zero_engine.catalog import delete, is_published
from zero_engine.checkpoint import draft_of
from zero_engine.errors import EngineError
from zero_engine.manifest import Manifest, Progress
from zero_engine.reshard import Run
from zero_engine.shard import Refusal, put_refusal
from zero_engine.staging import SharedCopy, Staged
from zero_engine.state import Subject
from zero_engine.store import Store, StoreError
from zero_engine.writer import Examined, Order, Outcome, WriterDied, WriterProcess

Policy = Literal["wait", "skip"]


@dataclass(frozen=True)
class SaveReport:
    """How a save ended on this rank."""

    step: int
    folder: str
    manifest: Manifest | None = None  # on rank 0, when it was published
    problem: str = ""  # empty: this rank's part went well
    skipped: bool = False
    blocked_seconds: float = 0.0  # the training thread waited: for the save before, and for the copies
    copy_seconds: float = 0.0
    write_seconds: float = 0.0  # hashing, writing and syncing this rank's shard
    publish_seconds: float = 0.0  # on rank 0: waiting for the other ranks' shards, and the manifest
    total_seconds: float = 0.0


@dataclass
class _Running:
    """The save under way."""

    draft: Manifest
    ticket: str
    files: tuple[tuple[str, bytes], ...]
    begun: float
    blocked_seconds: float
    copy_seconds: float = 0.0
    copied: threading.Event = field(default_factory=threading.Event)  # the engine may change its state again
    thread: threading.Thread | None = None
    error: Exception | None = None  # of the thread: there is no order to wait for


class Saver:
    """One rank's background saves into one store, under one fence. Ranks call it at the same steps.

    `patience_seconds`: how long a rank that says nothing is waited for, and a writer that gets nothing done.
    """

    def __init__(
        self, subject: Subject, store: Store, fence: int, policy: Policy = "wait", patience_seconds: float = 600.0
    ) -> None:
        self._subject, self._store, self._fence = subject, store, fence
        self._policy, self._patience_seconds = policy, patience_seconds
        self._copy = SharedCopy(subject)
        self._writer = self._new_writer()
        self._running: _Running | None = None
        self._reports: list[SaveReport] = []
        self._calls = 0  # the same on every rank
        self._latest = -1  # step of the last save that was begun
        self._failed: list[SaveReport] = []  # on rank 0: saves that came to nothing and may have left files
        self._sweeper: threading.Thread | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        self._collect(timeout_seconds=0)
        return self._running is not None

    def save(self, step: int, progress: Progress | None = None, files: Mapping[str, bytes] | None = None) -> bool:
        """Begin to save the state after `step`; False when the policy is to skip it, or when it is the latest again.

        A step is begun once, so that all ranks do the same; after a failed save a later step is saved. `files` are
        small and go into the checkpoint's folder as they are, from rank 0.
        """
        begun = time.monotonic()
        self._calls += 1
        if step == self._latest:
            return False
        draft = draft_of(self._subject, step, self._fence, progress or Progress())
        self._collect(timeout_seconds=0)
        if self._running is not None and self._policy == "skip":
            self._skip(draft)
            return False
        self._collect(timeout_seconds=None)
        self._latest = step
        buffers = self._copy.take_buffers()
        own = tuple((files or {}).items()) if self._subject.comm.rank == 0 else ()
        running = self._running = _Running(draft, self._ticket(draft), own, begun, time.monotonic() - begun)
        running.thread = threading.Thread(target=self._hand_over, args=(running, buffers), name="shardyard-save")
        running.thread.start()
        return True

    def hold(self) -> None:
        """Before the state changes: wait until it is copied."""
        running = self._running
        if running is not None and not running.copied.is_set():
            begun = time.monotonic()
            running.copied.wait()
            running.blocked_seconds += time.monotonic() - begun

    def poll(self) -> list[SaveReport]:
        """Saves that ended since the last call. Never waits, never raises for a save that failed."""
        self._collect(timeout_seconds=0)
        reports, self._reports = self._reports, []
        return reports

    def wait(self) -> None:
        """Wait for the save under way; `poll` tells how it ended."""
        self._collect(timeout_seconds=None)

    def finish(self) -> list[SaveReport]:
        """`wait`, then `poll`."""
        self.wait()
        return self.poll()

    def close(self, abandon: bool = False) -> None:
        """Wait for the save under way and end the writer. `abandon`: kill it instead, which no checkpoint minds.

        The engine does so too: what is closed already stays so.
        """
        if self._closed:
            return
        self._closed = True
        if abandon:
            self._writer.kill()
        else:
            self.wait()
            self._writer.close()
            if self._sweeper is not None:
                self._sweeper.join()
        self._copy.close()

    def _hand_over(self, running: _Running, buffers: Staged) -> None:
        """The thread: copy, let training go on, hand the copy to the writer and look at it while it is written."""
        try:
            try:
                state = self._copy.take(self._subject.owned())
            finally:
                running.copied.set()
                running.copy_seconds = time.monotonic() - running.begun - running.blocked_seconds
            self._writer.submit(self._order(running, state, buffers))
            self._writer.tell(self._examined(state, running.draft))
        except Exception as error:  # whatever it was, it is this save's problem, not the training's
            running.error = error

    def _order(self, running: _Running, state: list[tuple[Run, Tensor]], buffers: Staged) -> Order:
        draft, rank = running.draft, self._subject.comm.rank
        return Order(
            store=self._store,
            folder=draft.folder,
            rank=rank,
            ranks=draft.ranks,
            ticket=running.ticket,
            placed=self._copy.places(state),
            named=buffers,
            draft=draft if rank == 0 else None,
            patience_seconds=self._patience_seconds,
            files=running.files,
        )

    def _examined(self, state: list[tuple[Run, Tensor]], draft: Manifest) -> Examined:
        try:
            return Examined(self._subject.digest_part(state, draft.scalars))
        except Exception as error:  # whatever it was, the writer must not wait for it
            return Examined(0, _words(error))

    def _ticket(self, draft: Manifest) -> str:
        """Names this save among all tries that could meet in its folder."""
        return f"{draft.folder}, background call {self._calls}"

    def _skip(self, draft: Manifest) -> None:
        """Tell rank 0 that no shard will come, so that it waits for none."""
        self._heard(SaveReport(draft.step, draft.folder, skipped=True))
        refusal = Refusal("skipped: the save before it was still running", self._ticket(draft))
        rank = self._subject.comm.rank
        threading.Thread(target=_tell, args=(self._store, draft.folder, rank, refusal), name="shardyard-skip").start()

    def _collect(self, timeout_seconds: float | None) -> None:
        """Take the outcome of the save under way, if it is there or comes in time."""
        running = self._running
        if running is None or running.thread is None:
            return
        running.thread.join(timeout_seconds)
        if running.thread.is_alive():
            return
        outcome = self._outcome(running, timeout_seconds)
        if outcome is not None:
            self._running = None
            self._heard(_report(running, outcome))

    def settle(self) -> None:
        """No rank has a save under way: remove, beside training, what failed ones left half done."""
        self._clear_up(self._failed)

    def _heard(self, report: SaveReport) -> None:
        """Keep it for `poll`. When a save is published, those before it are settled.

        All ranks have then done their part of this save, and a rank does one at a time: nobody writes there any more.
        """
        self._reports.append(report)
        if self._subject.comm.rank != 0:
            return
        if report.manifest is None:
            self._failed.append(report)
        else:
            self._clear_up([failed for failed in self._failed if failed.step < report.step])

    def _clear_up(self, failed: Sequence[SaveReport]) -> None:
        """Begin to remove what these saves left half done."""
        if failed:
            before, folders = self._sweeper, [each.folder for each in failed]
            self._failed = [each for each in self._failed if each not in failed]
            self._sweeper = threading.Thread(target=_sweep, args=(self._store, folders, before), name="shardyard-sweep")
            self._sweeper.start()

    def _new_writer(self) -> WriterProcess:
        return WriterProcess(self._copy.descriptor, self._copy.num_bytes, self._patience_seconds)

    def _outcome(self, running: _Running, timeout_seconds: float | None) -> Outcome | None:
        """The writer's answer, or what went wrong on the way to it; then rank 0 is told, and a dead writer replaced."""
        error = running.error
        if error is None:
            try:
                return self._writer.outcome(timeout_seconds)
            except WriterDied as death:
                error = death
        if isinstance(error, WriterDied):
            self._writer = self._new_writer()
        problem = _words(error)
        _tell(self._store, running.draft.folder, self._subject.comm.rank, Refusal(problem, running.ticket))
        return Outcome(running.draft.folder, None, None, problem, 0.0, time.monotonic() - running.begun)


def _tell(store: Store, folder: str, rank: int, refusal: Refusal) -> None:
    """Put a refusal; when the store cannot even take that, rank 0's patience ends the save."""
    try:
        put_refusal(store, folder, rank, refusal)
    except StoreError:
        return


def _sweep(store: Store, folders: Sequence[str], before: threading.Thread | None) -> None:
    """Remove folders that are no checkpoints; where the store cannot, they stay until the attempt has ended."""
    if before is not None:
        before.join()
    for folder in folders:
        try:
            if not is_published(store, folder):
                delete(store, folder)
        except StoreError:
            return


def _words(error: Exception) -> str:
    """Our own errors are sentences; others say what they are."""
    return str(error) if isinstance(error, EngineError | StoreError) else f"{type(error).__name__}: {error}"


def _report(running: _Running, outcome: Outcome) -> SaveReport:
    return SaveReport(
        step=running.draft.step,
        folder=outcome.folder,
        manifest=outcome.manifest,
        problem=outcome.problem,
        blocked_seconds=running.blocked_seconds,
        copy_seconds=running.copy_seconds,
        write_seconds=outcome.write_seconds,
        publish_seconds=outcome.total_seconds - outcome.write_seconds,
        total_seconds=time.monotonic() - running.begun,
    )
