"""A process that writes checkpoint files, so that training never waits for a disk or an interpreter lock. Torch-free.

The rank copies its shard into shared memory and sends an `Order`; the writer hashes, writes and syncs from that memory
and answers with an `Outcome`. Rank 0's writer also waits for the other ranks' records in the store and publishes the
manifest: ranks agree through the store alone, no collective is involved. The writer ends with its rank: at once when
idle, otherwise after the file it is writing.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    digest_part: int
    draft: Manifest | None  # rank 0: what is known of the manifest; publishing it is part of the order
    patience_seconds: float  # how long rank 0 waits for a rank that says nothing
    problem: str = ""  # the state must not be saved: say so to rank 0 and write nothing


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
    order: Order, sources: Sequence[Source], named: Sequence[NamedSource], give_up: Callable[[], bool]
) -> Outcome:
    """Write the shard, say so, and on rank 0 publish. Every failure of a store becomes the outcome's problem."""
    begun = time.monotonic()
    shard, manifest, problem, written = None, None, order.problem, begun
    try:
        if is_published(order.store, order.folder):
            return Outcome(order.folder, None, None, f"{order.folder} is published and not written again", 0.0, 0.0)
        if not problem:
            done = write_shard(order.store, order.folder, order.rank, sources, named)
            put_record(order.store, order.folder, Record(done, order.digest_part, order.ticket))
            shard, written = done, time.monotonic()
        if not problem and order.draft is not None:
            records = wait_for_records(
                order.store, order.folder, order.ranks, order.ticket, order.patience_seconds, give_up
            )
            manifest = publish(order.store, order.draft, records)
    except (StoreError, CheckpointError, OSError) as error:
        problem = str(error)
    if shard is None:
        problem = _refuse(order, problem)
    return Outcome(order.folder, shard, manifest, problem, written - begun, time.monotonic() - begun)


class WriterProcess:
    """The rank's end: one writer, one order at a time."""

    def __init__(self, memory_descriptor: int, num_bytes: int) -> None:
        ours, theirs = socket.socketpair()
        numbers = [theirs.fileno(), memory_descriptor, num_bytes, os.getpid()]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "zero_engine.writer", *map(str, numbers)],
            pass_fds=numbers[:2],
            env=_environment(),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self.busy = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, order: Order) -> None:
        """Hand over an order. The memory it names must stay as it is until the outcome is there."""
        assert not self.busy, "the writer works on one order at a time"
        try:
            self._connection.send(order)
        except OSError as error:
            raise self._death() from error
        self.busy = True

    def outcome(self, timeout_seconds: float | None) -> Outcome | None:
        """The outcome of the order, None when it is not there in time. Raises WriterDied."""
        try:
            if not self._connection.poll(timeout_seconds):
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

    def kill(self) -> None:
        """End the process at once; what it was writing is no checkpoint."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _death(self) -> WriterDied:
        self.busy = False
        code = self._process.wait()
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return WriterDied(f"the checkpoint writer ended {how}")


def serve(connection: Connection, memory: memoryview, rank_process: int) -> None:
    """The writer's end: orders one after the other until the rank is gone."""
    while True:
        try:
            order: Order = connection.recv()
        except (EOFError, ConnectionError):
            return
        sources, named = sources_in(order, memory)
        outcome = carry_out(order, sources, named, give_up=lambda: os.getppid() != rank_process)
        try:
            connection.send(outcome)
        except ConnectionError:
            return


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
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def main() -> None:
    """The process: arguments are the descriptors of connection and memory, the memory's bytes, the rank's pid."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, which then saves
    with mmap.mmap(int(sys.argv[2]), int(sys.argv[3]), prot=mmap.PROT_READ) as shared:
        serve(Connection(int(sys.argv[1])), memoryview(shared), rank_process=int(sys.argv[4]))
        os._exit(0)  # the last order still views the memory, so it cannot be unmapped in peace


if __name__ == "__main__":
    import zero_engine.writer  # by its own name, so that what is pickled here is known there

    zero_engine.writer.main()
