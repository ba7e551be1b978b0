"""Death before and after every call on a store that has no rename: what is listed is whole, whoever died when.

The files of a local store are enumerated finer, call by call to the kernel, in test_store_catalog.py and, with real
processes, in tests/distributed. Here a store is what an S3 bucket is: an object appears when its upload ends.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.counted_calls import CountedCalls
from tests.unit.checkpoint_by_hand import ByHand
from zero_engine.catalog import delete, list_checkpoints, unfinished, verify
from zero_engine.fetcher import Filled, Part
from zero_engine.manifest import CheckpointError
from zero_engine.shard import Record, publish, put_record, wait_for_records, write_shard
from zero_engine.store import Bytes, ErrorType, LocalStore, NotFound, Store, StoreError, Writer, check_key
from zero_engine.writer import Examined, Order, carry_out


@dataclass
class Bucket:
    """Objects in memory."""

    objects: dict[str, bytes] = field(default_factory=dict)
    read_bytes = 2**20
    url = "memory"

    def create(self, key: str) -> Writer:
        return _Upload(self, check_key(key))

    def put(self, key: str, data: Bytes) -> None:
        self.objects[check_key(key)] = bytes(data)

    def get(self, key: str) -> bytes:
        if key not in self.objects:
            raise NotFound(key)
        return self.objects[key]

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        data = self.get(key)[offset : offset + len(buffer)]
        if len(data) < len(buffer):
            raise StoreError(f"{key} is truncated")
        buffer[:] = data

    def read_parts(self, key: str, parts: Sequence[Part], filled: Filled, alone: bool) -> None:
        for number, part in enumerate(parts):
            self.read_into(key, part.offset, part.buffer)
            filled(number)

    def size(self, key: str) -> int:
        return len(self.get(key))

    def list(self, prefix: str = "") -> Iterator[str]:
        yield from [key for key in self.objects if key.startswith(prefix)]

    def folders(self) -> Iterator[str]:
        yield from dict.fromkeys(key.split("/")[0] for key in self.objects)

    def loose(self) -> Iterator[str]:
        yield from [key for key in self.objects if "/" not in key]

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def delete_unfinished(self, prefix: str) -> None:
        """An upload that did not end is nothing."""

    def probe(self) -> None:
        """Memory takes everything."""


@dataclass
class _Upload:
    bucket: Bucket
    key: str
    data: bytearray = field(default_factory=bytearray)

    def write(self, data: Bytes) -> None:
        self.data += data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.bucket.objects[self.key] = bytes(self.data)


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


@dataclass
class Dying:
    """A store whose user dies around its n-th call: an even number before, an odd one after it took effect."""

    inner: Store
    moments: int

    def _around(self, call: Callable[[], Any]) -> Any:
        if self.moments == 0:
            raise Killed
        result = call()
        if self.moments == 1:
            raise Killed
        self.moments -= 2
        return result

    @property
    def read_bytes(self) -> int:
        return self.inner.read_bytes

    @property
    def url(self) -> str:
        return self.inner.url

    def create(self, key: str) -> Writer:
        return _DyingWriter(self, self._around(lambda: self.inner.create(key)))

    def put(self, key: str, data: Bytes) -> None:
        self._around(lambda: self.inner.put(key, data))

    def get(self, key: str) -> bytes:
        return bytes(self._around(lambda: self.inner.get(key)))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._around(lambda: self.inner.read_into(key, offset, buffer))

    def read_parts(self, key: str, parts: Sequence[Part], filled: Filled, alone: bool) -> None:
        self._around(lambda: self.inner.read_parts(key, parts, filled, alone))

    def size(self, key: str) -> int:
        return int(self._around(lambda: self.inner.size(key)))

    def list(self, prefix: str = "") -> Iterator[str]:
        return iter(self._around(lambda: list(self.inner.list(prefix))))

    def folders(self) -> Iterator[str]:
        return iter(self._around(lambda: list(self.inner.folders())))

    def loose(self) -> Iterator[str]:
        return iter(self._around(lambda: list(self.inner.loose())))

    def delete(self, key: str) -> None:
        self._around(lambda: self.inner.delete(key))

    def delete_unfinished(self, prefix: str) -> None:
        self._around(lambda: self.inner.delete_unfinished(prefix))

    def probe(self) -> None:
        self._around(self.inner.probe)


@dataclass
class _DyingWriter:
    store: Dying
    inner: Writer

    def write(self, data: Bytes) -> None:
        self.store._around(lambda: self.inner.write(data))

    def __enter__(self) -> Self:
        self.inner.__enter__()
        return self

    def __exit__(self, kind: ErrorType, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.inner.__exit__(kind, error, trace)
            return
        self.store._around(lambda: self.inner.__exit__(None, None, None))


def until_it_lives(attempt: Callable[[int], bool]) -> int:
    """Call with 0, 1, 2, ... moments to live until it returns True; how many died."""
    moments = 0
    while not attempt(moments):
        moments += 1
    return moments


def require_whole(store: Store, old: str) -> None:
    """The older checkpoint is there; what is listed verifies; a sweep leaves nothing else."""
    names = list_checkpoints(store)
    assert names[-1].folder == old and all(verify(store, name.folder).ok for name in names)
    for left in unfinished(store, before_fence=9):
        delete(store, left)
    assert {key.split("/")[0] for key in store.list()} == {name.folder for name in names}


ORDERS = [order for order in permutations(("0 shard", "0 record", "1 shard", "1 record")) if order.index("0 shard") <
          order.index("0 record") and order.index("1 shard") < order.index("1 record")]  # fmt: skip


@pytest.mark.parametrize("both", [True, False], ids=["all ranks die", "rank 1 dies"])
def test_a_death_around_any_call_of_a_save_leaves_whole_checkpoints(both: bool) -> None:
    """Rank 1's death alone leaves rank 0 waiting, which then says who is missing; nothing half is ever listed."""

    def attempt(moments: int) -> bool:
        bucket = Bucket()
        old = ByHand(bucket, step=4).publish().folder
        dying = Dying(bucket, moments)
        rank_0, rank_1 = ByHand(dying if both else bucket), ByHand(dying)
        try:
            rank_1.write_shard(1)
            rank_0.write_shard(0)
            records = wait_for_records(rank_0.store, rank_0.folder, 2, "t", patience_seconds=0)
            publish(rank_0.store, rank_0.draft(), records)
        except Killed:
            if not both:
                with suppress(CheckpointError):  # rank 0 lives on
                    rank_0.write_shard(0)
                    records = wait_for_records(bucket, rank_0.folder, 2, "t", patience_seconds=0)
                    publish(bucket, rank_0.draft(), records)
            require_whole(bucket, old)
            return False
        require_whole(bucket, old)
        assert len(list_checkpoints(bucket)) == 2
        return True

    assert until_it_lives(attempt) > (40 if both else 16)


def test_a_death_around_any_call_of_a_deletion_leaves_whole_checkpoints() -> None:
    """The folder is whole or not listed, and the deletion can be called again."""

    def attempt(moments: int) -> bool:
        bucket = Bucket()
        old = ByHand(bucket, step=4).publish().folder
        new = ByHand(bucket).publish().folder
        try:
            delete(Dying(bucket, moments), new)
        except Killed:
            require_whole(bucket, old)
            delete(bucket, new)
            assert {key.split("/")[0] for key in bucket.list()} == {old}
            return False
        return True

    assert until_it_lives(attempt) > 14


@dataclass
class Massacre(CountedCalls):
    """kill -9 of the whole group, ranks and writers, before a call."""

    def die(self) -> None:
        os.killpg(0, signal.SIGKILL)


def test_all_writers_killed_at_once_at_any_call_leave_whole_checkpoints(memory_path: Path) -> None:
    """Two processes carry out their orders at the same time; at every file call of either, both are gone."""
    for victim in (0, 1):

        def attempt(allowed: int, victim: int = victim) -> bool:
            root = memory_path / f"{victim}-{allowed}"
            store = LocalStore(root)
            old = ByHand(store, step=4).publish().folder
            group = os.fork()
            if group == 0:
                os.setsid()
                os._exit(carry_out_together(root, victim, allowed))
            _, status = os.waitpid(group, 0)
            require_whole(store, old)
            return not os.WIFSIGNALED(status)

        assert until_it_lives(attempt) > 10


def carry_out_together(root: Path, victim: int, allowed: int) -> int:
    """Both ranks' orders, each in a process of this group."""
    children = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            store = LocalStore(root, Massacre(allowed) if rank == victim else None)
            by_hand = ByHand(store)
            draft = by_hand.draft() if rank == 0 else None
            order = Order(store, by_hand.folder, rank, 2, "t", (), (), draft, patience_seconds=30)
            found = partial(Examined, rank + 1)
            outcome = carry_out(order, by_hand.sources(rank), [], found, give_up=lambda: False)
            os._exit(1 if outcome.problem else 0)
        children.append(child)
    return sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_the_order_of_the_ranks_does_not_matter(order: tuple[str, ...]) -> None:
    """Shards and records arrive in any order that each rank keeps for itself; the manifest is published once, whole."""
    bucket = Bucket()
    by_hand = ByHand(bucket)
    aside = Bucket()
    ByHand(aside).publish()
    for step in order:
        rank, what = step.split()
        name = f"rank-{int(rank):05d}" + (".safetensors" if what == "shard" else ".json")
        assert list_checkpoints(bucket) == ()
        bucket.put(f"{by_hand.folder}/{name}", aside.get(f"{by_hand.folder}/{name}"))
    publish(bucket, by_hand.draft(), wait_for_records(bucket, by_hand.folder, 2, "t", patience_seconds=0))
    assert verify(bucket, by_hand.folder).ok


def test_an_older_clock_makes_no_older_checkpoint() -> None:
    """The wall clock went back ten years between two saves: the later step is the newest one all the same."""
    bucket = Bucket()
    for step, created in ((1, "2036-01-01T00:00:00+00:00"), (2, "2026-01-01T00:00:00+00:00")):
        by_hand = ByHand(bucket, step=step)
        for rank in (0, 1):
            by_hand.write_shard(rank)
        records = wait_for_records(bucket, by_hand.folder, 2, "t", patience_seconds=0)
        publish(bucket, replace(by_hand.draft(), created=created), records)
    assert [name.step for name in list_checkpoints(bucket)] == [2, 1]


@pytest.mark.parametrize("kind", ["master", "exp_avg", "exp_avg_sq"])
def test_a_state_without_one_of_its_kinds_is_never_published(kind: str) -> None:
    """Weights without moments, or moments without weights, are no checkpoint: the save names what is absent."""
    bucket = Bucket()
    by_hand = ByHand(bucket)
    by_hand.write_shard(0)
    sources = [source for source in by_hand.sources(1) if source.kind != kind]
    put_record(bucket, by_hand.folder, Record(write_shard(bucket, by_hand.folder, 1, sources), 0, "t"))
    with pytest.raises(CheckpointError, match=f"of {kind} are in no shard"):
        publish(bucket, by_hand.draft(), wait_for_records(bucket, by_hand.folder, 2, "t", patience_seconds=0))
    assert list_checkpoints(bucket) == ()
