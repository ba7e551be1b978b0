"""The digest of a state: one number however it is cut, another number when any bit of it changes."""

from __future__ import annotations

import pytest
import torch

from zero_engine.digest import digest_of, hex_of, run_part, tensor_part
from zero_engine.layout import Layout, ParameterSpec, Range

SPECS = (ParameterSpec("a", (101, 3)), ParameterSpec("b", (5,)), ParameterSpec("c", (700, 2), unit="u"))


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in SPECS}


def flat_of(layout: Layout, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    flat = torch.full((layout.padded,), float("nan"))
    for entry in layout.entries:
        flat[entry.start : entry.range.stop] = tensors[entry.spec.name].reshape(-1)
    return flat


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_a_digest_is_the_same_for_every_cut(ranks: int) -> None:
    """The parts of all ranks add up to the digest of whole tensors; padding, even NaN, does not count."""
    layout, tensors = Layout.build(SPECS), state()
    flat, total = flat_of(layout, tensors), 0
    for rank in range(ranks):
        for piece in layout.pieces(rank, ranks):
            total += run_part(layout, "parameter", piece.run, piece.range, flat[piece.range.start : piece.range.stop])
    whole = sum(tensor_part("parameter", e.ordinal, 0, tensors[e.spec.name].reshape(-1)) for e in layout.entries)
    assert hex_of(total) == hex_of(whole)


def test_every_flipped_bit_changes_the_digest() -> None:
    """One bit of one element, the last odd one included."""
    layout, tensors = Layout.build(SPECS), state()
    steps = {spec.name: 3 for spec in SPECS}
    before = digest_of(layout, {"parameter": tensors}, steps, 3)
    for name, place in (("a", 0), ("a", 1), ("a", 302), ("b", 4), ("c", 1399)):
        for bit in (0, 13, 31):
            bits = tensors[name].view(-1).view(torch.int32)[place]
            mask = torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
            bits.bitwise_xor_(mask)
            assert digest_of(layout, {"parameter": tensors}, steps, 3) != before, (name, place, bit)
            bits.bitwise_xor_(mask)
    assert digest_of(layout, {"parameter": tensors}, steps, 3) == before


def test_exchanged_values_kinds_and_counts_change_the_digest() -> None:
    """It knows which value stands where: a swap within a tensor, between rows, parameters or kinds is seen."""
    layout, steps = Layout.build(SPECS), {spec.name: 3 for spec in SPECS}
    tensors = state()
    seen = {digest_of(layout, {"parameter": tensors}, steps, 3)}
    seen.add(digest_of(layout, {"exp_avg": tensors}, steps, 3))
    seen.add(digest_of(layout, {"parameter": tensors}, steps, 4))
    seen.add(digest_of(layout, {"parameter": tensors}, {**steps, "b": 4}, 3))
    seen.add(digest_of(layout, {"parameter": {**tensors, "a": tensors["a"].flip(0)}}, steps, 3))
    seen.add(digest_of(layout, {"parameter": {**tensors, "a": tensors["a"].flip(1)}}, steps, 3))
    assert len(seen) == 6


def test_rows_of_the_table_differ() -> None:
    """A long parameter uses the table again under another scale: equal values moved by a row are seen."""
    values = torch.zeros(4 << 16)
    first, second = values.clone(), values.clone()
    first[10], second[10 + (1 << 16)] = 1.0, 1.0
    assert tensor_part("parameter", 0, 0, first) != tensor_part("parameter", 0, 0, second)
    whole = torch.randn(4 << 16, generator=torch.Generator().manual_seed(1))
    parts = sum(tensor_part("m", 2, cut, whole[cut : cut + 70_000]) for cut in range(0, 4 << 16, 70_000))
    assert parts % 2**64 == tensor_part("m", 2, 0, whole)


def test_the_digest_of_version_1_is_frozen() -> None:
    """A stored digest stays comparable: the number is part of the format."""
    layout = Layout.build([ParameterSpec("w", (3,))])
    assert digest_of(layout, {"parameter": {"w": torch.tensor([1.0, -2.0, 0.5])}}, {"w": 1}, 1) == "e4b952ed74993c19"
    assert Range(0, 3).meet(Range(1, 2)) == Range(1, 2)
