"""The map from parameters to flat elements."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_engine.buckets import buckets_of
from zero_engine.layout import ALIGNMENT, Layout, ParameterSpec, block_size

_shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
_specs = st.lists(
    st.builds(
        ParameterSpec,
        name=st.just(""),
        shape=_shapes,
        dtype=st.sampled_from(["float32", "bfloat16"]),
        unit=st.sampled_from(["", "a", "b", "c"]),
        group=st.integers(0, 2),
        trainable=st.booleans(),
    ),
    max_size=12,
).map(lambda specs: [ParameterSpec(**{**vars(spec), "name": f"p{i}"}) for i, spec in enumerate(specs)])


@given(_specs)
def test_every_element_has_one_aligned_place_in_a_run_of_its_kind(specs: list[ParameterSpec]) -> None:
    """Entries do not overlap, start aligned, and stand in a run with their group, dtype, trainability and unit."""
    layout = Layout.build(specs)
    end = 0
    for entry in layout.entries:
        run = layout.runs[entry.run]
        assert entry.start >= end and entry.start % ALIGNMENT == 0
        assert run.start <= entry.start and entry.range.stop <= run.stop
        assert (run.group, run.dtype, run.trainable) == (entry.spec.group, entry.spec.dtype, entry.spec.trainable)
        assert layout.units[run.unit].name == entry.spec.unit
        end = entry.range.stop
    assert sum(len(entry.range) for entry in layout.entries) == layout.num_parameters
    assert all(run.start % layout.block == run.stop % layout.block == 0 for run in layout.runs)


@given(_specs, st.integers(1, 6))
def test_ranks_own_every_block_once_and_evenly(specs: list[ParameterSpec], ranks: int) -> None:
    """Pieces of all ranks tile every run; within a unit no rank owns more than one block above another."""
    layout = Layout.build(specs)
    every = [piece for rank in range(ranks) for piece in layout.pieces(rank, ranks)]
    pieces = sorted(every, key=lambda piece: piece.range.start)
    assert [piece.range.start for piece in pieces[1:]] == [piece.range.stop for piece in pieces[:-1]]
    assert sum(len(piece.range) for piece in pieces) == layout.padded
    for unit in layout.units:
        sizes = [len(part) // layout.block for part in layout.cut(unit.index, ranks)]
        assert max(sizes) - min(sizes) <= 1
    for rank in range(ranks):
        local = 0
        for piece in layout.pieces(rank, ranks):
            assert piece.local == (local if layout.runs[piece.run].trainable else None)
            local += len(piece.range) if layout.runs[piece.run].trainable else 0


@given(_specs, st.integers(1, 5))
def test_buckets_hold_each_trainable_element_once(specs: list[ParameterSpec], ranks: int) -> None:
    """Segments of all owners tile a bucket; all buckets together are the trainable elements."""
    layout = Layout.build(specs)
    buckets = buckets_of(layout, "bfloat16", ranks)
    assert sum(bucket.length for bucket in buckets) == layout.trainable
    for bucket in buckets:
        covered = sorted((s.bucket.start, s.bucket.stop) for owner in bucket.segments for s in owner)
        assert covered[0][0] == 0 and covered[-1][1] == bucket.length
        assert all(a[1] == b[0] for a, b in pairwise(covered))
        assert sum(map(len, bucket.owners)) == bucket.length


@given(_specs)
def test_a_layout_survives_json(specs: list[ParameterSpec]) -> None:
    """What a manifest stores gives back the same layout and fingerprint."""
    layout = Layout.build(specs)
    again = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout and again.fingerprint == layout.fingerprint


@given(_specs, st.integers(1, 6))
def test_the_number_of_ranks_moves_no_element(specs: list[ParameterSpec], ranks: int) -> None:
    """The same element has the same flat place whatever the cut: only ownership changes."""
    layout = Layout.build(specs)
    assert {p.run for rank in range(ranks) for p in layout.pieces(rank, ranks)} == {
        index for index, run in enumerate(layout.runs) if len(run.range)
    }


def test_block_size_is_a_power_of_two_between_its_bounds() -> None:
    """2^round(log2(P/32768)), 256 to 131072."""
    assert [block_size(count) for count in (0, 1, 10**6, 27_400_000, 125_000_000, 10**12)] == [
        256, 256, 256, 1024, 4096, 131072,
    ]  # fmt: skip


def test_a_stored_layout_of_other_blocks_is_refused() -> None:
    """A manifest that does not fit its own specs is an error, not a silent shift."""
    data = Layout.build([ParameterSpec("w", (3, 5))]).to_json()
    with pytest.raises(ValueError, match="block size"):
        Layout.from_json({**data, "block": 512})
