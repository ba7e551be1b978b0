"""The one map from parameters to flat elements, shared by buffers, optimizer, checkpoint and plan. Torch-free.

All parameters stand in one flat space of elements. A *unit* is a contiguous part of it, cut into the same block-aligned
ranges, one per rank, at every stage. Inside a unit, parameters of one (optimizer group, dtype, trainable) form a *run*,
padded to whole *blocks*, at least one. The block size depends on the model alone, so neither the number of ranks nor
the stage moves an element. Unit 0 is the root unit: it owns what no other unit can own alone, and may be empty.

    flat   |<----------- unit 0 (root) ----------->|<------ unit 1 ------>| ...
    runs   | group 0 fp32 .... | group 1 fp32 .... | group 0 | group 1    |
    blocks |    |    |    |    |    |    |    |    |    |    |    |       |
    N = 2  | rank 0 .............. | rank 1 ...... | rank 0 .  | rank 1 . |
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

ALIGNMENT = 32  # elements: every parameter starts on a 64-byte boundary in fp32, bf16 and fp16, as torch allocates
SMALLEST_BLOCK, LARGEST_BLOCK = 256, 131072
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
ITEM_BYTES |= {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}


@dataclass(frozen=True)
class ParameterSpec:
    """One distinct parameter as the model declares it; tied names stand together."""

    name: str  # the first name, canonical
    shape: tuple[int, ...]
    dtype: str = "float32"  # as the model was built, a key of ITEM_BYTES
    unit: str = ""  # name of the owning unit; "" is the root unit
    group: int = 0  # index of the optimizer group
    trainable: bool = True
    aliases: tuple[str, ...] = ()  # its other names

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of the flat space."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def meet(self, other: Range) -> Range:
        """The common part; empty (of length 0) when there is none."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))


@dataclass(frozen=True)
class Entry:
    """A parameter and its place."""

    spec: ParameterSpec
    start: int  # first flat element, a multiple of ALIGNMENT
    canonical: int  # first element in the unpadded order of named_parameters(): what digests and files count by
    ordinal: int  # number of the parameter in that order
    run: int

    @property
    def range(self) -> Range:
        return Range(self.start, self.start + self.spec.numel)


@dataclass(frozen=True)
class Run:
    """Parameters of one unit with the same group, dtype and trainability, padded to whole blocks."""

    unit: int
    group: int
    dtype: str
    trainable: bool
    start: int
    stop: int

    @property
    def range(self) -> Range:
        return Range(self.start, self.stop)


@dataclass(frozen=True)
class Unit:
    """Parameters gathered and released together."""

    index: int
    name: str
    start: int
    stop: int
    runs: tuple[int, ...]

    @property
    def range(self) -> Range:
        return Range(self.start, self.stop)


@dataclass(frozen=True)
class Piece:
    """A part of one run that one rank owns."""

    unit: int
    run: int
    range: Range
    local: int | None  # first element in the rank's own fp32 buffers (sums, master, moments); None when frozen


@dataclass(frozen=True)
class Layout:
    """The map. Build it with `Layout.build`; equal inputs give equal layouts on every machine."""

    block: int  # elements per block
    entries: tuple[Entry, ...]  # in flat order
    runs: tuple[Run, ...]
    units: tuple[Unit, ...]  # unit 0 is the root

    @staticmethod
    def build(parameters: Sequence[ParameterSpec]) -> Layout:
        """Lay out `parameters`, given in the order of named_parameters(). Pure; linear in their number."""
        block = block_size(sum(spec.numel for spec in parameters))
        canonical, order = 0, list[tuple[ParameterSpec, int, int]]()
        for ordinal, spec in enumerate(parameters):
            order.append((spec, canonical, ordinal))
            canonical += spec.numel
        names = ["", *dict.fromkeys(spec.unit for spec in parameters if spec.unit)]
        entries, runs, units, position = list[Entry](), list[Run](), list[Unit](), 0
        for index, name in enumerate(names):
            members = sorted((item for item in order if item[0].unit == name), key=_run_key)
            unit_start, unit_runs = position, list[int]()
            for key in dict.fromkeys(map(_run_key, members)):
                run_start = position
                for spec, first, ordinal in (item for item in members if _run_key(item) == key):
                    entries.append(Entry(spec, position, first, ordinal, len(runs)))
                    position += _round_up(spec.numel, ALIGNMENT)
                position = run_start + max(block, _round_up(position - run_start, block))
                unit_runs.append(len(runs))
                runs.append(Run(index, *key, run_start, position))
            units.append(Unit(index, name, unit_start, position, tuple(unit_runs)))
        return Layout(block, tuple(entries), tuple(runs), tuple(units))

    @property
    def num_parameters(self) -> int:
        """Elements of all distinct parameters, without padding."""
        return sum(entry.spec.numel for entry in self.entries)

    @property
    def padded(self) -> int:
        """Elements of the flat space."""
        return self.units[-1].stop

    @cached_property
    def trainable(self) -> int:
        """Elements of all trainable runs, padding included."""
        return sum(len(run.range) for run in self.runs if run.trainable)

    @cached_property
    def by_name(self) -> dict[str, Entry]:
        """Every name, tied ones included."""
        return {name: entry for entry in self.entries for name in (entry.spec.name, *entry.spec.aliases)}

    @cached_property
    def canonical_entries(self) -> tuple[Entry, ...]:
        """Entries in the order of named_parameters()."""
        return tuple(sorted(self.entries, key=lambda entry: entry.ordinal))

    def entries_of(self, unit: int) -> tuple[Entry, ...]:
        """The entries of one unit, in flat order."""
        return self._entries_by_unit[unit]

    @cached_property
    def _entries_by_unit(self) -> tuple[tuple[Entry, ...], ...]:
        rows: list[list[Entry]] = [[] for _ in self.units]
        for entry in self.entries:
            rows[self.runs[entry.run].unit].append(entry)
        return tuple(map(tuple, rows))

    def cut(self, unit: int, ranks: int) -> tuple[Range, ...]:
        """One unit in `ranks` contiguous block ranges, rank by rank; the remainder starts at rank `unit % ranks`."""
        each, extra = divmod((self.units[unit].stop - self.units[unit].start) // self.block, ranks)
        start, ranges = self.units[unit].start, list[Range]()
        for rank in range(ranks):
            stop = start + self.block * (each + ((rank - unit) % ranks < extra))
            ranges.append(Range(start, stop))
            start = stop
        return tuple(ranges)

    def pieces(self, rank: int, ranks: int) -> tuple[Piece, ...]:
        """What `rank` of `ranks` owns, in flat order; trainable pieces stand back to back in its fp32 buffers."""
        found = self._pieces.get((rank, ranks))
        if found is None:
            found = self._pieces[rank, ranks] = self._found_pieces(rank, ranks)
        return found

    @cached_property
    def _pieces(self) -> dict[tuple[int, int], tuple[Piece, ...]]:
        return {}

    def _found_pieces(self, rank: int, ranks: int) -> tuple[Piece, ...]:
        local, pieces = 0, list[Piece]()
        for unit in self.units:
            mine = self.cut(unit.index, ranks)[rank]
            for number in unit.runs:
                part = self.runs[number].range.meet(mine)
                if len(part):
                    trainable = self.runs[number].trainable
                    pieces.append(Piece(unit.index, number, part, local if trainable else None))
                    local += len(part) if trainable else 0
        return tuple(pieces)

    def shard_elements(self, rank: int, ranks: int) -> int:
        """Elements of the rank's own fp32 buffers."""
        return sum(len(piece.range) for piece in self.pieces(rank, ranks) if piece.local is not None)

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers: what a manifest stores. Places are not stored, they follow from the specs."""
        return {"block": self.block, "parameters": [asdict(entry.spec) for entry in self.canonical_entries]}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Layout:
        """The layout of a manifest. Raises ValueError when the stored block size is not the one the specs give."""
        specs = [
            ParameterSpec(**{**item, "shape": tuple(item["shape"]), "aliases": tuple(item["aliases"])})
            for item in data["parameters"]
        ]
        layout = Layout.build(specs)
        if layout.block != data["block"]:
            raise ValueError(f"stored block size {data['block']} is not {layout.block}, which the parameters give")
        return layout

    @cached_property
    def fingerprint(self) -> str:
        """64 hex digits that name the layout."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


def block_size(parameters: int) -> int:
    """Elements per block for a model of `parameters` elements: about 32768 blocks, a power of two in 256..131072."""
    if parameters <= 0:
        return SMALLEST_BLOCK
    return min(LARGEST_BLOCK, max(SMALLEST_BLOCK, 1 << max(0, round(math.log2(parameters / 32768)))))


def total(ranges: Iterable[Range]) -> int:
    """Elements of disjoint ranges."""
    return sum(map(len, ranges))


def _run_key(item: tuple[ParameterSpec, int, int]) -> tuple[int, str, bool]:
    spec = item[0]
    return (spec.group, spec.dtype, spec.trainable)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
