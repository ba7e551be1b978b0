"""The process that writes: it answers every order, and its death is seen."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_by_hand import ByHand

from zero_engine.catalog import list_checkpoints, verify
from zero_engine.file_calls import FileCalls
from zero_engine.shard import Refusal, get_record
from zero_engine.store import LocalStore, Store
from zero_engine.writer import Examined, Order, Outcome, Placed, WriterDied, WriterProcess

TICKET = "t"


class FullDisk(FileCalls):
    """A disk without space."""

    def write(self, descriptor: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")


class Suicide(FileCalls):
    """A writer that is killed when it comes to publish its file."""

    def rename(self, source: Path, target: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Rank:
    """One rank with its shared memory filled and its writer running."""

    def __init__(self, by_hand: ByHand, rank: int) -> None:
        self.by_hand, self.rank = by_hand, rank
        sources = by_hand.sources(rank)
        data = b"".join(bytes(source.data) for source in sources)
        self.memory = os.memfd_create("shard")
        os.write(self.memory, data)
        offset, placed = 0, []
        for source in sources:
            size = len(source.data)
            placed.append(Placed(source.kind, source.dtype, source.first, source.block_bytes, offset, size))
            offset += size
        self.placed = tuple(placed)
        self.writer = WriterProcess(self.memory, len(data))

    def order(self, store: Store, patience_seconds: float = 60) -> Order:
        draft = self.by_hand.draft() if self.rank == 0 else None
        folder, ranks = self.by_hand.folder, self.by_hand.ranks
        return Order(store, folder, self.rank, ranks, TICKET, self.placed, (), draft, patience_seconds)

    def begin(self, order: Order, problem: str = "") -> None:
        self.writer.submit(order)
        self.writer.tell(Examined(self.rank + 1, problem))

    def save(self, order: Order, problem: str = "") -> Outcome:
        self.begin(order, problem)
        outcome = self.writer.outcome(timeout_seconds=60)
        assert outcome is not None
        return outcome

    def close(self) -> None:
        self.writer.close()
        os.close(self.memory)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    by_hand = ByHand(LocalStore(tmp_path / "store"))
    both = [Rank(by_hand, rank) for rank in range(2)]
    yield both
    for rank in both:
        rank.close()


def test_two_writers_publish_one_checkpoint_through_the_store_alone(ranks: list[Rank]) -> None:
    """No process talks to another; rank 0 waits for rank 1's record."""
    store = ranks[0].by_hand.store
    ranks[0].begin(ranks[0].order(store))
    assert ranks[1].save(ranks[1].order(store)).problem == ""
    outcome = ranks[0].writer.outcome(timeout_seconds=60)
    assert outcome is not None and outcome.manifest is not None and outcome.manifest.digest == f"{3:016x}"
    assert [name.step for name in list_checkpoints(store)] == [5]
    assert verify(store, outcome.folder).ok


def test_a_writer_serves_one_order_after_another(ranks: list[Rank]) -> None:
    """The process and its memory are used again."""
    store = ranks[1].by_hand.store
    pid = ranks[1].writer.pid
    for _ in range(3):
        assert ranks[1].save(ranks[1].order(store)).shard is not None
    assert ranks[1].writer.pid == pid


def test_a_full_disk_is_an_outcome_and_no_checkpoint(ranks: list[Rank]) -> None:
    """The error comes back as a sentence; the writer lives on for the next save."""
    store = ranks[0].by_hand.store
    full = LocalStore(store.url, FullDisk())
    outcome = ranks[0].save(ranks[0].order(full))
    assert "No space left" in outcome.problem and outcome.shard is None
    assert list_checkpoints(store) == ()
    assert ranks[1].save(ranks[1].order(store)).problem == ""


def test_a_rank_that_may_not_save_tells_rank_0_why(ranks: list[Rank]) -> None:
    """Rank 0 does not wait for a shard that will never come, and repeats the reason."""
    store = ranks[0].by_hand.store
    assert ranks[1].save(ranks[1].order(store), problem="w is not finite").shard is None
    assert [key for key in store.list() if key.endswith(".safetensors")] == [], "what was written has no name"
    assert isinstance(get_record(store, ranks[0].by_hand.folder, 1), Refusal)
    assert "rank 1 could not save its shard: w is not finite" in ranks[0].save(ranks[0].order(store)).problem
    assert list_checkpoints(store) == ()


def test_a_shard_gets_its_name_only_when_its_rank_has_looked_at_it(ranks: list[Rank]) -> None:
    """Written and hashed meanwhile; a rank that dies before it has looked leaves nothing."""
    store, rank = ranks[1].by_hand.store, ranks[1]
    rank.writer.submit(rank.order(store))
    assert rank.writer.outcome(timeout_seconds=0.05) is None and list(store.list()) == []
    rank.writer.tell(Examined(2))
    outcome = rank.writer.outcome(timeout_seconds=60)
    assert outcome is not None and outcome.shard is not None
    rank.writer.submit(rank.order(LocalStore(Path(store.url, "other"))))
    rank.writer.close()
    assert list(LocalStore(Path(store.url, "other")).list()) == []


def test_a_silent_rank_ends_the_save_not_the_writer(ranks: list[Rank]) -> None:
    """Rank 0's patience ends; there is no checkpoint and the next order is taken."""
    store = ranks[0].by_hand.store
    assert "no shard from ranks [1]" in ranks[0].save(ranks[0].order(store, patience_seconds=0)).problem
    assert list_checkpoints(store) == ()
    assert ranks[1].save(ranks[1].order(store)).problem == ""
    assert ranks[0].save(ranks[0].order(store)).manifest is not None


def test_a_killed_writer_is_reported_with_its_signal(ranks: list[Rank]) -> None:
    """kill -9 before the file has its name: an error that says so, and nothing in the store."""
    store = ranks[0].by_hand.store
    ranks[0].begin(ranks[0].order(LocalStore(store.url, Suicide())))
    with pytest.raises(WriterDied, match="SIGKILL"):
        ranks[0].writer.outcome(timeout_seconds=60)
    assert list(store.list()) == []


def test_a_writer_ends_with_its_rank(tmp_path: Path) -> None:
    """kill -9 of the rank while rank 0's writer waits for the others: the writer leaves, nothing is published."""
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from checkpoint_by_hand import ByHand
from test_store_writer import Rank
from zero_engine.store import LocalStore
rank = Rank(ByHand(LocalStore(Path({str(tmp_path)!r}))), 0)
rank.begin(rank.order(rank.by_hand.store, patience_seconds=3600))
print(rank.writer.pid, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    writer = os.pidfd_open(int(process.stdout.readline()))
    process.stdin.write("die\n")
    process.stdin.flush()
    process.wait()

    assert select.select([writer], [], [], 30)[0], "the writer outlived its rank"
    os.close(writer)
    assert list_checkpoints(LocalStore(tmp_path)) == ()


def test_the_writer_loads_no_torch(ranks: list[Rank]) -> None:
    """It must start in an instant and stay small: its memory map names no torch library."""
    ranks[1].save(ranks[1].order(ranks[1].by_hand.store))
    assert "torch" not in Path(f"/proc/{ranks[1].writer.pid}/maps").read_text()
