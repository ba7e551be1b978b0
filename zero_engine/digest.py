"""A 64-bit digest of the training state that does not depend on how it is sharded. Version 1.

    digest = sum, modulo 2^64, of mix(kind, index, value) over every element of every state tensor,
             plus mix(count kind, parameter number, step count), plus mix(step kind, 0, step)

`kind` is the first 8 bytes of sha256 of "1/" + the tensor's name ("parameter", "exp_avg", ...); `index` is the
element's number in the unpadded order of named_parameters(); `value` its 32 bits as fp32. A sum has no order, so every
rank adds what it owns and the parts are added. It tells equal states from different ones and resists no forgery.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from zero_engine.layout import Layout, Range

VERSION = 1
_STRIDE = 1 << 18  # elements mixed at a time
_MASK = (1 << 64) - 1
_A, _B, _C = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93  # odd, well mixed


def digest_of(
    layout: Layout, states: Mapping[str, Mapping[str, Tensor]], steps: Mapping[str, int], step: int
) -> str:
    """The digest of whole tensors, for plain loops: `states` by kind and parameter name, step counts by name."""
    total = counts_part(layout, [steps[entry.spec.name] for entry in layout.canonical_entries], step)
    for kind, tensors in states.items():
        for entry in layout.canonical_entries:
            if entry.spec.name in tensors:
                total += tensor_part(kind, entry.canonical, tensors[entry.spec.name].detach().reshape(-1))
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
            total += tensor_part(kind, entry.canonical + common.start - entry.start, own)
    return total & _MASK


def tensor_part(kind: str, first: int, values: Tensor) -> int:
    """The part of consecutive elements from canonical index `first` on."""
    total = 0
    for start in range(0, values.numel(), _STRIDE):
        part = values[start : start + _STRIDE]
        bits = part.to(torch.float32).contiguous().view(torch.int32).to(torch.int64)
        index = torch.arange(first + start, first + start + part.numel(), dtype=torch.int64, device=part.device)
        total += int(_mix(_kind(kind), index, bits).sum().item())
    return total & _MASK


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
