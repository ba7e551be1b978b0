"""A process that writes checkpoint files, so that training never waits for a disk or an interpreter lock. Torch-free.

The rank copies its shard into shared memory and sends an `Order`; the writer hashes, writes and syncs from that memory
and answers with an `Outcome`. Meanwhile the rank looks at the copy and says what it `Examined`: before that the shard
gets no name. Rank 0's writer also waits for the other ranks' records in the store and publishes the
manifest: ranks agree through the store alone, no collective is involved. The writer ends with its rank: at once when
idle, otherwise after the file it is writing. It counts what it gets done in an eventfd; one that gets nothing done for
too long is killed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection

from zero_engine.catalog import is_published
from zero_engine.manifest import CheckpointError, Manifest, Shard
from zero_engine.shard import (
    NamedSource,
    Record,
    Refusal,
    Source,
    publish,
    put_record,
    put_refusal,
    wait_for_records,
    write_shard,
)
from zero_engine.store import Store, StoreError

LOOK_SECONDS = 1.0  # between looks at whether a writer gets anything done
REAP_SECONDS = 1.0  # for a killed writer to be gone; one that hangs in the kernel is left behind

Moved = Callable[[], None]


@dataclass(frozen=True)
class Placed:
    """Blocks of one kind at a place in the shared memory."""

    kind: str
    dtype: str
    first: int  # block
    block_bytes: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class PlacedName:
    """A whole tensor at a place in the shared memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Order:
    """One rank's part of a save. The store travels pickled: it holds a place and settings, no open connection."""

    store: Store
    folder: str
    rank: int
    ranks: int
    ticket: str
    placed: tuple[Placed, ...]
    named: tuple[PlacedName, ...]
    draft: Manifest | None  # rank 0: what is known of the manifest; publishing it is part of the order
    patience_seconds: float  # how long rank 0 waits for a rank that says nothing
    files: tuple[tuple[str, bytes], ...] = ()  # small files to put into the folder before the manifest: name, content


@dataclass(frozen=True)
class Examined:
    """What a rank found in the state that its order is about."""

    digest_part: int
    problem: str = ""  # it must not be saved: rank 0 is told so and nothing stays


@dataclass(frozen=True)
class Outcome:
    """What became of an order."""

    folder: str
    shard: Shard | None  # durable
    manifest: Manifest | None  # published, on rank 0
    problem: str  # empty: all went well
    write_seconds: float
    total_seconds: float


class WriterDied(StoreError):
    """The writer process ended without an answer; the save it worked on is no checkpoint."""

    code = "writer_died"


def carry_out(
    order: Order,
    sources: Sequence[Source],
    named: Sequence[NamedSource],
    examined: Callable[[], Examined],
    give_up: Callable[[], bool],
    moved: Moved = lambda: None,
) -> Outcome:
    """Write the shard, say so, and on rank 0 publish. Every failure of a store becomes the outcome's problem.

    `examined` may wait and always says the same. `moved` is called for each piece written and each look for the other
    ranks' records.
    """
    begun = time.monotonic()
    shard, manifest, problem, written = None, None, "", begun

    def approve() -> None:
        if examined().problem:
            raise CheckpointError(examined().problem)

    def waiting() -> bool:
        moved()
        return give_up()

    try:
        if is_published(order.store, order.folder):
            return Outcome(order.folder, None, None, f"{order.folder} is published and not written again", 0.0, 0.0)
        for name, content in order.files:
            order.store.put(f"{order.folder}/{name}", content)
        done = write_shard(order.store, order.folder, order.rank, sources, named, moved, approve)
        put_record(order.store, order.folder, Record(done, examined().digest_part, order.ticket))
        shard, written = done, time.monotonic()
        if order.draft is not None:
            records = wait_for_records(
                order.store, order.folder, order.ranks, order.ticket, order.patience_seconds, waiting
            )
            manifest = publish(order.store, order.draft, records)
    except (StoreError, CheckpointError, OSError) as error:
        problem = str(error)
    if shard is None:
        problem = _refuse(order, problem)
    return Outcome(order.folder, shard, manifest, problem, written - begun, time.monotonic() - begun)


class WriterProcess:
    """The rank's end: one writer, one order at a time."""

    def __init__(self, memory_descriptor: int, num_bytes: int, stall_seconds: float = 600.0) -> None:
        """`stall_seconds`: a writer that gets nothing done for so long, or does not even read, is killed."""
        ours, theirs = socket.socketpair()
        whole_seconds, rest = divmod(round(stall_seconds * 1e6), 1_000_000)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole_seconds, rest))
        self._stall_seconds = stall_seconds
        self._moved = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        numbers = [theirs.fileno(), memory_descriptor, self._moved, num_bytes, os.getpid()]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "zero_engine.writer", *map(str, numbers)],
            pass_fds=numbers[:3],
            env=_environment(),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._moved_at = time.monotonic()
        self.busy = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, order: Order) -> None:
        """Hand over an order. The memory it names must stay as it is until the outcome is there."""
        assert not self.busy, "the writer works on one order at a time"
        self._send(order)
        self._moved_at = time.monotonic()
        self.busy = True

    def tell(self, examined: Examined) -> None:
        """Once for every order: what is in the memory that it names."""
        self._send(examined)

    def outcome(self, timeout_seconds: float | None) -> Outcome | None:
        """The outcome of the order, None when it is not there in time. Raises WriterDied."""
        try:
            while not self._connection.poll(LOOK_SECONDS if timeout_seconds is None else timeout_seconds):
                self._require_progress()
                if timeout_seconds is not None:
                    return None
            outcome: Outcome = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error
        self.busy = False
        return outcome

    def close(self) -> None:
        """End the process: at once when idle, otherwise when its order is carried out."""
        self._connection.close()
        self._process.wait()
        self._release()

    def kill(self) -> None:
        """End the process at once; what it was writing is no checkpoint."""
        self.busy = False
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_SECONDS)
        self._release()

    def _send(self, message: Order | Examined) -> None:
        try:
            self._connection.send(message)
        except BlockingIOError as error:  # the send's own time-out: a large order waits for its reader
            raise self._stalled() from error
        except OSError as error:
            raise self._death() from error

    def _release(self) -> None:
        self._connection.close()
        if self._moved >= 0:
            os.close(self._moved)
            self._moved = -1

    def _require_progress(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._moved)
            self._moved_at = time.monotonic()
        if self.busy and time.monotonic() - self._moved_at > self._stall_seconds:
            raise self._stalled()

    def _stalled(self) -> WriterDied:
        self.kill()
        return WriterDied(f"the checkpoint writer got nothing done for {self._stall_seconds:g} s and was killed")

    def _death(self) -> WriterDied:
        self.busy = False
        code = self._process.wait()
        self._release()
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return WriterDied(f"the checkpoint writer ended {how}")


def serve(connection: Connection, memory: memoryview, moved: Moved, rank_process: int) -> None:
    """The writer's end: orders one after the other until the rank is gone."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            order: Order = connection.recv()
            examined: Callable[[], Examined] = cache(connection.recv)
            sources, named = sources_in(order, memory)
            outcome = carry_out(order, sources, named, examined, lambda: os.getppid() != rank_process, moved)
            examined()  # also when nobody asked: what comes then is the next order
            connection.send(outcome)


def sources_in(order: Order, memory: memoryview) -> tuple[list[Source], list[NamedSource]]:
    """What an order names, as views of the memory."""
    sources = [
        Source(part.kind, part.dtype, part.first, part.block_bytes, memory[part.offset : part.offset + part.num_bytes])
        for part in order.placed
    ]
    named = [
        NamedSource(part.name, part.dtype, part.shape, memory[part.offset : part.offset + part.num_bytes])
        for part in order.named
    ]
    return sources, named


def _refuse(order: Order, problem: str) -> str:
    """Tell rank 0 why there is no shard; when even that fails, its patience ends the save."""
    try:
        put_refusal(order.store, order.folder, order.rank, Refusal(problem, order.ticket))
    except StoreError as error:
        return f"{problem} (and rank 0 could not be told: {error})"
    return problem


def _environment() -> dict[str, str]:
    """The rank's own, with its import path: the store's class may come from anywhere on it."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}


def main() -> None:
    """The process: arguments are the descriptors of connection, memory and eventfd, bytes of memory, the rank's pid."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, which then saves
    connection, memory, moved, num_bytes, rank_process = map(int, sys.argv[1:])
    with mmap.mmap(memory, num_bytes, prot=mmap.PROT_READ) as shared:
        serve(Connection(connection), memoryview(shared), lambda: os.eventfd_write(moved, 1), rank_process)
        os._exit(0)  # the last order still views the memory, so it cannot be unmapped in peace


if __name__ == "__main__":
    import zero_engine.writer  # by its own name, so that what is pickled here is known there

    zero_engine.writer.main()
