"""Listing, verifying, deleting and exporting checkpoints, without torch."""

from __future__ import annotations

import json
import os
import struct
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoint_by_hand import SPECS, ByHand, value

from tests.counted_calls import CountedCalls
from zero_engine.catalog import (
    delete,
    list_checkpoints,
    next_fence,
    read_manifest,
    unfinished,
    unreferenced,
    verify,
)
from zero_engine.export import Export, ExportError, bf16_to_fp32, fp32_to_bf16, fp32_to_fp16
from zero_engine.file_calls import FileCalls
from zero_engine.manifest import CheckpointError
from zero_engine.shard import MANIFEST, wait_for_records
from zero_engine.store import LocalStore
from zero_engine.tensorfile import decode_header, header_bytes


@pytest.fixture
def store(memory_path: Path) -> LocalStore:
    return LocalStore(memory_path / "store")


def damage(store: LocalStore, key: str, place: int) -> None:
    """Flip one bit of a file in place."""
    path = store.root / key
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_folder_without_a_manifest_is_not_listed(store: LocalStore) -> None:
    """All shards and records are there, the manifest is not: nothing."""
    by_hand = ByHand(store)
    for rank in range(2):
        by_hand.write_shard(rank)
    assert list_checkpoints(store) == ()
    with pytest.raises(CheckpointError, match="never finished"):
        read_manifest(store, by_hand.folder)
    assert verify(store, by_hand.folder).problems != ()


def test_the_newest_comes_first_by_attempt_then_step(store: LocalStore) -> None:
    """A branch that restarted at an earlier step is newer than what it left behind; clocks play no part."""
    for step, fence in ((10, 1), (100, 1), (60, 2), (20, 2)):
        ByHand(store, step, fence).publish()
    os.utime(store.root / "step-0000000010-attempt-000001" / MANIFEST, (2e9, 2e9))
    assert [(name.fence, name.step) for name in list_checkpoints(store)] == [(2, 60), (2, 20), (1, 100), (1, 10)]
    assert next_fence(store) == 3


def test_foreign_things_in_the_store_are_reported_and_left(store: LocalStore) -> None:
    """A file that is not ours is neither a checkpoint nor removed."""
    ByHand(store).publish()
    store.put("notes/readme", b"x")
    store.put("loose", b"x")
    assert len(list_checkpoints(store)) == 1
    assert unreferenced(store) == ("loose", "notes/readme")


def test_a_whole_checkpoint_verifies_and_counts_its_bytes(store: LocalStore) -> None:
    """verify reads every byte of every shard once."""
    manifest = ByHand(store).publish()
    told = list[int]()
    found = verify(store, manifest.folder, told.append)
    assert found.ok and found.bytes_read == sum(told) == manifest.total_bytes
    assert manifest.total_bytes == sum(store.size(f"{manifest.folder}/{shard.file}") for shard in manifest.shards)


class Uncached(FileCalls):
    """A page cache that holds nothing; `through` counts what segments would put into it."""

    def __init__(self) -> None:
        self.direct, self.past, self.through = False, 0, 0

    def go_direct(self, descriptor: int, direct: bool) -> None:
        self.direct = direct

    def read_cached(self, descriptor: int, view: memoryview, offset: int) -> int:
        raise BlockingIOError

    def read(self, descriptor: int, view: memoryview, offset: int) -> int:
        count = super().read(descriptor, view, offset)
        self.past, self.through = self.past + self.direct * count, self.through + (not self.direct) * count
        return count


def test_verifying_leaves_the_page_cache_to_training(store: LocalStore) -> None:
    """Blocks that no cache holds are read past it, and damage is found all the same; headers and buffers are small."""
    manifest = ByHand(store).publish()
    (first, *_), files = manifest.shards, Uncached()
    small = sum(shard.header_bytes + sum(blob.num_bytes for blob in shard.blobs) for shard in manifest.shards)
    assert verify(LocalStore(store.root, files), manifest.folder).ok
    assert files.through <= small and files.past >= manifest.total_bytes - small
    damage(store, f"{manifest.folder}/{first.file}", first.segments[0].offset)
    (found,) = verify(LocalStore(store.root, Uncached()), manifest.folder).damage
    assert (found.rank, found.blocks) == (first.rank, (first.segments[0].first,))


def test_any_flipped_bit_of_a_shard_is_found(store: LocalStore) -> None:
    """Header, blocks, padding and buffers are all covered: every byte of the file."""
    manifest = ByHand(store).publish()
    shard = manifest.shards[0]
    for place in [
        *range(0, shard.header_bytes, 97),
        *range(shard.header_bytes, shard.file_bytes, 509),
        shard.file_bytes - 1,
    ]:
        damage(store, f"{manifest.folder}/{shard.file}", place)
        assert not verify(store, manifest.folder).ok, place
        damage(store, f"{manifest.folder}/{shard.file}", place)
    assert verify(store, manifest.folder).ok


def test_every_bad_rank_and_block_is_listed(store: LocalStore) -> None:
    """Damage does not end the reading: blocks of both ranks and a buffer are found in one go."""
    manifest = ByHand(store).publish()
    first, second = manifest.shards
    segment = next(segment for segment in first.segments if segment.count > 1)
    for number in (0, segment.count - 1):
        damage(store, f"{manifest.folder}/{first.file}", segment.offset + number * segment.block_bytes)
    damage(store, f"{manifest.folder}/{first.file}", first.blobs[0].offset)
    damage(store, f"{manifest.folder}/{second.file}", second.segments[-1].offset + 3)
    found = verify(store, manifest.folder)
    assert [(item.rank, item.kind, item.blocks) for item in found.damage] == [
        (0, segment.kind, (segment.first, segment.first + segment.count - 1)),
        (0, first.blobs[0].name, ()),
        (1, second.segments[-1].kind, (second.segments[-1].first,)),
    ]
    assert found.bad_ranks == (0, 1) and len(found.problems) == 3


def test_a_truncated_missing_or_foreign_shard_is_named(store: LocalStore) -> None:
    """The reason says which file and what is wrong with it."""
    manifest = ByHand(store).publish()
    other = ByHand(store, step=6).publish()
    path = store.root / manifest.folder / "rank-00001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert "rank-00001.safetensors" in verify(store, manifest.folder).problems[0]
    path.unlink()
    assert "is missing" in verify(store, manifest.folder).problems[0]
    path.write_bytes((store.root / other.folder / "rank-00001.safetensors").read_bytes())
    assert "does not match" in verify(store, manifest.folder).problems[0]
    path.write_bytes(whole)
    assert verify(store, manifest.folder).ok


def test_a_manifest_in_another_folder_is_refused(store: LocalStore) -> None:
    """A copied manifest does not make its new folder a checkpoint."""
    manifest = ByHand(store).publish()
    store.put(f"step-0000000009-attempt-000001/{MANIFEST}", manifest.encode())
    with pytest.raises(CheckpointError, match="belongs to step-0000000005"):
        read_manifest(store, "step-0000000009-attempt-000001")


def test_records_of_another_save_are_not_taken(store: LocalStore) -> None:
    """A record left by an earlier try does not complete a later one; the silent ranks are named."""
    by_hand = ByHand(store)
    by_hand.write_shard(0)
    with pytest.raises(CheckpointError, match=r"ranks \[1\]"):
        wait_for_records(store, by_hand.folder, 2, "t", patience_seconds=0)
    by_hand.write_shard(1)
    with pytest.raises(CheckpointError, match=r"ranks \[0, 1\]"):
        wait_for_records(store, by_hand.folder, 2, "another", patience_seconds=0)


def test_deletion_leaves_nothing(store: LocalStore) -> None:
    """After delete the store is as before the save; deleting again is no error."""
    ByHand(store, step=1).publish()
    before = sorted(store.list())
    folder = ByHand(store, step=2).publish().folder
    delete(store, folder)
    delete(store, folder)
    assert sorted(store.list()) == before
    assert not (store.root / folder).exists()
    with pytest.raises(CheckpointError, match="not the name"):
        delete(store, "notes")


class Stop(BaseException):
    """Stands for kill -9: nothing catches it."""


class DiesAt(CountedCalls):
    """Dies by an exception that nothing catches."""

    def die(self) -> None:
        raise Stop


def test_a_deletion_killed_at_any_call_never_shows_half_a_checkpoint(memory_path: Path) -> None:
    """At every boundary the folder is whole and verified, or not listed; and what is left can be swept."""
    finished, allowed = False, 0
    while not finished:
        root = memory_path / str(allowed)
        store = LocalStore(root)
        folder = ByHand(store).publish().folder
        with suppress(Stop):
            delete(LocalStore(root, DiesAt(allowed)), folder)
            finished = True
        for name in list_checkpoints(store):
            assert verify(store, name.folder).ok
        for left in unfinished(store, before_fence=2):
            delete(store, left)
        assert list_checkpoints(store) or not list(root.rglob("*"))
        allowed += 1
    assert allowed > 10


def test_a_save_killed_at_any_call_is_whole_or_nothing(memory_path: Path) -> None:
    """Enumerates every call of a two-rank save: the older one stays, the new one is listed only when whole."""
    finished, allowed = False, 0
    while not finished:
        root = memory_path / str(allowed)
        store = LocalStore(root)
        old = ByHand(store, step=4).publish()
        with suppress(Stop):
            ByHand(LocalStore(root, DiesAt(allowed))).publish()
            finished = True
        names = list_checkpoints(store)
        assert names[-1].folder == old.folder
        assert all(verify(store, name.folder).ok for name in names)
        for left in unfinished(store, before_fence=2):
            delete(store, left)
        assert {path.name for path in root.iterdir()} == {name.folder for name in names}
        allowed += 1
    assert allowed > 30


def test_saves_of_the_running_attempt_are_not_swept(store: LocalStore) -> None:
    """An unfinished folder of an attempt that may still be writing is not debris; a started deletion always is."""
    ByHand(store, fence=3).write_shard(0)
    assert unfinished(store, before_fence=3) == ()
    assert len(unfinished(store, before_fence=4)) == 1


def read_export(export: Export) -> tuple[dict[str, tuple[str, tuple[int, ...], bytes]], dict[str, str]]:
    data = b"".join(export.pieces())
    assert len(data) == export.num_bytes
    entries, metadata = decode_header(data[: header_bytes(data[:8])])
    return {entry.name: (entry.dtype, entry.shape, data[entry.start : entry.stop]) for entry in entries}, metadata


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 12])
def test_an_export_holds_each_value_under_its_name(store: LocalStore, ranks: int) -> None:
    """Names, shapes and numbers are the model's whatever the number of ranks; padding and moments are not in it."""
    manifest = ByHand(store, ranks=ranks).publish()
    tensors, metadata = read_export(Export(store, manifest))
    assert list(tensors) == [spec.name for spec in SPECS] + ["norm.mean"]
    assert json.loads(metadata["tied"]) == {"head.weight": "embed.weight"}
    for place in manifest.layout.canonical_entries:
        dtype, shape, data = tensors[place.spec.name]
        kind = "master" if place.spec.trainable else "frozen"
        expected = [value(kind, element) + manifest.step / 8 for element in range(place.start, place.range.stop)]
        assert (dtype, shape) == ("F32", place.spec.shape)
        assert list(struct.unpack(f"<{place.spec.numel}f", data)) == expected


def test_an_export_refuses_a_damaged_block(store: LocalStore) -> None:
    """Weights that are not what was saved are never handed out."""
    manifest = ByHand(store).publish()
    segment = next(s for s in manifest.shards[1].segments if s.kind == "master")
    damage(store, f"{manifest.folder}/rank-00001.safetensors", segment.offset)
    with pytest.raises(CheckpointError, match="does not match"):
        list(Export(store, manifest).pieces())


def test_an_export_has_the_dtype_that_was_asked(store: LocalStore) -> None:
    """bf16 halves the file; an unknown dtype is refused by name."""
    manifest = ByHand(store).publish()
    tensors, _ = read_export(Export(store, manifest, dtype="bf16"))
    assert {dtype for dtype, _, _ in tensors.values()} == {"BF16"}
    whole, _ = read_export(Export(store, manifest))
    assert bf16_to_fp32(memoryview(tensors["norm.mean"][2])) == whole["norm.mean"][2]
    with pytest.raises(ExportError, match="fp8"):
        Export(store, manifest, dtype="fp8")
    assert read_export(Export(store, manifest, dtype="fp16"))[0]["scale"][0] == "F16"


def test_bf16_rounds_to_nearest_even() -> None:
    """Ties, signs, subnormals and the largest value, against the definition."""
    for bits in (0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000, 0x00000001, 0xFF7F7FFF, 0x80000000, 0):
        low, kept = bits & 0xFFFF, bits >> 16
        expected = kept + (low > 0x8000 or (low == 0x8000 and kept & 1 == 1))
        data = memoryview(struct.pack("<3I", bits, 0xFF7F7FFF, bits))
        assert struct.unpack("<3H", fp32_to_bf16(data))[::2] == (expected, expected)
    with pytest.raises(ExportError, match="65504"):
        fp32_to_fp16(memoryview(struct.pack("<f", 1e6)))
