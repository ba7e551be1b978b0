"""The manifest says everything and notices when it no longer says what was written."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_by_hand import ByHand
from hypothesis import given
from hypothesis import strategies as st

from zero_engine.manifest import (
    CHECKSUM_BYTES,
    CheckpointError,
    Manifest,
    Segment,
    Shard,
    encode_sealed,
    folder_name,
    parse_folder,
)
from zero_engine.store import LocalStore


def test_a_manifest_survives_the_round_trip(tmp_path: Path) -> None:
    """decode(encode(m)) == m, names in any script included."""
    manifest = ByHand(LocalStore(tmp_path)).publish()
    assert Manifest.decode(manifest.encode()) == manifest


def test_a_manifest_is_one_json_document(tmp_path: Path) -> None:
    """Any tool can read it."""
    document = json.loads(ByHand(LocalStore(tmp_path)).publish().encode())
    assert document["format"] == "shardyard-checkpoint" and document["version"] == 1
    assert document["body"]["step"] == 5


def test_a_stored_manifest_of_version_1_is_read(tmp_path: Path) -> None:
    """The file in golden/ was written when version 1 was new; every later build reads it as it was meant."""
    stored = (Path(__file__).parent / "golden" / "manifest-version-1.json").read_bytes()
    assert Manifest.decode(stored) == ByHand(LocalStore(tmp_path)).publish()


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    """Flip one bit of any byte, or cut the file anywhere: a CheckpointError, never another manifest."""
    data = ByHand(LocalStore(tmp_path)).publish().encode()
    for place in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(CheckpointError):
            Manifest.decode(bytes(damaged))
    for length in range(0, len(data), 13):
        with pytest.raises(CheckpointError):
            Manifest.decode(data[:length])


def test_a_newer_version_is_refused_by_number() -> None:
    """An old build says that it is old instead of guessing."""
    with pytest.raises(CheckpointError, match="version 99"):
        Manifest.decode(encode_sealed({"format": "shardyard-checkpoint", "version": 99}, {}))
    with pytest.raises(CheckpointError, match="not one of ours"):
        Manifest.decode(encode_sealed({"format": "other", "version": 1}, {}))


def test_a_manifest_without_a_field_is_refused() -> None:
    """A sealed body that lacks something is named as such."""
    with pytest.raises(CheckpointError, match=r"layout|arithmetic"):
        Manifest.decode(encode_sealed({"format": "shardyard-checkpoint", "version": 1}, {"step": 1}))


def test_a_number_that_is_not_json_is_refused_when_written(tmp_path: Path) -> None:
    """NaN in the extra fields fails at save, not at load."""
    manifest = ByHand(LocalStore(tmp_path)).publish()
    progress = replace(manifest.progress, extra={"loss": float("nan")})
    with pytest.raises(ValueError, match="JSON"):
        replace(manifest, progress=progress).encode()


@given(step=st.integers(0, 10**12), fence=st.integers(0, 10**9))
def test_folder_names_carry_step_and_attempt(step: int, fence: int) -> None:
    """parse(name(step, fence)) == (step, fence), also beyond the padding."""
    assert parse_folder(folder_name(step, fence)) == (step, fence)


@pytest.mark.parametrize(
    "name", ["", "step-1-attempt-1", "step-0000000001-attempt-000001x", "cache", "step-٣-attempt-1"]
)
def test_other_names_are_no_checkpoints(name: str) -> None:
    """A foreign folder in the store is left alone."""
    assert parse_folder(name) is None


def test_checksums_of_shards_differ_with_any_block(tmp_path: Path) -> None:
    """The checksum of a shard covers the checksum of every block."""
    shard = ByHand(LocalStore(tmp_path)).publish().shards[0]
    segment = shard.segments[0]
    changed = bytes([segment.checksums[0] ^ 1]) + segment.checksums[1:]
    assert (
        replace(shard, segments=(replace(segment, checksums=changed), *shard.segments[1:])).checksum != shard.checksum
    )


def test_ten_thousand_shards_are_written_and_read_in_a_blink(tmp_path: Path) -> None:
    """The manifest is linear in the shards: 10,000 of them decode in well under the second a commit may take."""
    manifest = ByHand(LocalStore(tmp_path)).publish()
    segment = Segment("master", "F32", 0, 1, 0, 1024, bytes(CHECKSUM_BYTES))
    shards = tuple(Shard(rank, f"rank-{rank:05d}", 1024, 0, "0" * 16, (segment,)) for rank in range(10_000))
    begun = time.process_time()
    decoded = Manifest.decode(replace(manifest, shards=shards).encode())
    assert len(decoded.shards) == 10_000
    assert time.process_time() - begun < 5


def test_the_server_side_files_load_no_torch() -> None:
    """Manifest, catalog, export and store work where torch is not imported."""
    program = (
        "import sys; import zero_engine.catalog, zero_engine.export, zero_engine.reshard; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
