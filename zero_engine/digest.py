"""A 64-bit digest of the training state that does not depend on how it is sharded. Version 1.

    digest = sum, modulo 2^64, of weight(kind, parameter, index) * value over every element of every state tensor,
             plus mix(count kind, parameter number, step count), plus mix(step kind, -1, step)

`parameter` is the number in the order of named_parameters(), `index` the element's number in the parameter, `value` its
32 bits as fp32. Elements 2k and 2k + 1 share one odd 64-bit weight, the second shifted up by 32 bits, so that a
product does for both:

    weight(kind, parameter, 2k) = scale(kind, parameter) * scale(row of k) * table[k mod 32768]   all odd, mixed
    weight(kind, parameter, 2k + 1) = weight(kind, parameter, 2k) * 2^32

An odd weight maps every change of a pair to a change of the sum. A sum has no order, so every rank adds what it owns
and the parts are added. It tells equal states from different ones; it is no protection against forgery.

Note: why products and not a mix of every element. Mixing takes a dozen passes over 8-byte integers (0.22 GB/s a core),
this takes one (3 to 6 GB/s), so a checkpoint's digest costs less than writing it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache

import torch
from torch import Tensor

from zero_engine.layout import Layout, Range

VERSION = 1
_ROW = 1 << 15  # pairs multiplied at a time: what a core keeps at hand
_MASK = (1 << 64) - 1
_A, _B, _C = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93  # odd, well mixed


def digest_of(layout: Layout, states: Mapping[str, Mapping[str, Tensor]], steps: Mapping[str, int], step: int) -> str:
    """The digest of whole tensors, for plain loops: `states` by kind and parameter name, step counts by name."""
    total = counts_part(layout, [steps[entry.spec.name] for entry in layout.canonical_entries], step)
    for kind, tensors in states.items():
        for entry in layout.canonical_entries:
            if entry.spec.name in tensors:
                total += tensor_part(kind, entry.ordinal, 0, tensors[entry.spec.name].detach().reshape(-1))
    return hex_of(total)


def hex_of(total: int) -> str:
    """16 hex digits."""
    return f"{total & _MASK:016x}"


def run_part(layout: Layout, kind: str, run: int, part: Range, values: Tensor) -> int:
    """The part of flat elements `part` of `run`, whose 1-D values are given; padding does not count."""
    total = 0
    for entry in layout.entries_of(layout.runs[run].unit):
        common = entry.range.meet(part)
        if entry.run == run and len(common):
            own = values[common.start - part.start : common.stop - part.start]
            total += tensor_part(kind, entry.ordinal, common.start - entry.start, own)
    return total & _MASK


def tensor_part(kind: str, ordinal: int, first: int, values: Tensor) -> int:
    """The part of consecutive elements of parameter number `ordinal` from element `first`, an even one, on."""
    assert first % 2 == 0, f"element {first} is the second of a pair"
    pairs, total, start = _pairs(values), 0, 0
    table = _table(values.device)
    while start < pairs.numel():
        row, column = divmod(first // 2 + start, _ROW)
        part = pairs[start : start + _ROW - column]
        total += _scale("row", row) * _dot(part, table[column : column + part.numel()])
        start += part.numel()
    return total * _scale(kind, ordinal) & _MASK


def _pairs(values: Tensor) -> Tensor:
    """1-D int64: two fp32 values each, a zero after the last of an odd number."""
    flat = values.to(torch.float32).contiguous()
    if flat.numel() % 2 or flat.storage_offset() % 2 or flat.data_ptr() % 8:
        even = torch.zeros(flat.numel() + flat.numel() % 2, dtype=torch.float32, device=flat.device)
        even[: flat.numel()] = flat
        flat = even
    return flat.view(torch.int64)


def _dot(left: Tensor, right: Tensor) -> int:
    """Sum of products, wrapping. CUDA has no dot of integers."""
    product = torch.dot(left, right) if left.device.type == "cpu" else left.mul(right).sum()
    return int(product.item())


@cache
def _table(device: torch.device) -> Tensor:
    """1-D int64 of _ROW odd numbers."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return _mix(_kind("table"), torch.arange(_ROW, device=device), zero).bitwise_or_(1)


@cache
def _scale(kind: str, number: int) -> int:
    """An odd 64-bit number."""
    mixed = _mix(_kind(kind), torch.tensor([number]), torch.tensor([1]))
    return int(mixed.item()) & _MASK | 1


def counts_part(layout: Layout, counts: Iterable[int], step: int) -> int:
    """The part of the step counts (by parameter number) and of the step itself."""
    numbers = torch.tensor([*counts, step], dtype=torch.int64)
    index = torch.arange(len(numbers), dtype=torch.int64)
    index[-1] = -1
    return int(_mix(_kind("step"), index, numbers).sum().item()) & _MASK


def _mix(kind: int, index: Tensor, value: Tensor) -> Tensor:
    """One int64 per element; all arithmetic wraps."""
    mixed = index.mul(_signed(_A)).add_(value.mul(_signed(_B))).add_(kind)
    mixed.bitwise_xor_(_shifted(mixed, 32)).mul_(_signed(_C))
    return mixed.bitwise_xor_(_shifted(mixed, 29)).mul_(_signed(_A))


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Logical right shift."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _kind(name: str) -> int:
    return _signed(int.from_bytes(hashlib.sha256(f"{VERSION}/{name}".encode()).digest()[:8], "little"))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
