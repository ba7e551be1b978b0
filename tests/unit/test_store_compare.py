"""Two checkpoints are compared by their manifests, whoever wrote them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_by_hand import ByHand

from zero_engine.compare import differences
from zero_engine.layout import Layout, ParameterSpec
from zero_engine.manifest import CheckpointError, Manifest
from zero_engine.store import LocalStore


def changed(manifest: Manifest, kind: str, block: int) -> Manifest:
    """The manifest with another checksum for one block."""
    shards = []
    for shard in manifest.shards:
        segments = []
        for segment in shard.segments:
            place = 8 * (block - segment.first)
            if segment.kind == kind and 0 <= place < len(segment.checksums):
                checksums = bytearray(segment.checksums)
                checksums[place] ^= 1
                segment = replace(segment, checksums=bytes(checksums))
            segments.append(segment)
        shards.append(replace(shard, segments=tuple(segments)))
    return replace(manifest, shards=tuple(shards))


def test_other_ranks_with_the_same_bits_do_not_differ(tmp_path: Path) -> None:
    """The cut of the writer plays no part."""
    first = ByHand(LocalStore(tmp_path / "a"), ranks=2).publish()
    second = ByHand(LocalStore(tmp_path / "b"), ranks=3).publish()
    assert differences(first, second) == ()


def test_a_difference_names_kind_and_parameters(tmp_path: Path) -> None:
    """One changed block of one moment: the parameters that stand in it."""
    manifest = ByHand(LocalStore(tmp_path)).publish()
    entry = manifest.layout.by_name["blocks.1.weight"]
    (found,) = differences(manifest, changed(manifest, "exp_avg", entry.start // manifest.layout.block))
    assert (found.kind, found.blocks) == ("exp_avg", 1) and "blocks.1.weight" in found.parameters


def test_checkpoints_of_other_models_are_not_compared(tmp_path: Path) -> None:
    """An error, not a list of everything."""
    first = ByHand(LocalStore(tmp_path / "a")).publish()
    other = ByHand(LocalStore(tmp_path / "b"), layout=Layout.build([ParameterSpec("w", (3,))])).publish()
    with pytest.raises(CheckpointError, match="different models"):
        differences(first, other)
