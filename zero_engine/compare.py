"""Where two checkpoints differ, from their manifests alone: blocks with other checksums. Torch-free.

Two runs with the same arithmetic hold the same bits at the same step, however many ranks wrote them; this names the
parameters where they do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zero_engine.layout import Range
from zero_engine.manifest import CHECKSUM_BYTES, CheckpointError, Manifest


@dataclass(frozen=True)
class Difference:
    """Blocks of one kind of state that are not the same, and whose they are."""

    kind: str
    blocks: int  # how many differ
    parameters: tuple[str, ...]  # with elements in them, in flat order


def differences(first: Manifest, second: Manifest) -> tuple[Difference, ...]:
    """One entry per kind of state that differs; empty when every bit is the same.

    Raises CheckpointError when the two are not of the same model.
    """
    if first.layout.to_json() != second.layout.to_json():
        raise CheckpointError(f"{first.folder} and {second.folder} are of different models")
    theirs = dict(_checksums(second))
    changed: dict[str, list[int]] = {}
    for place, checksum in _checksums(first):
        if theirs.pop(place, None) != checksum:
            changed.setdefault(place[0], []).append(place[1])
    for kind, block in theirs:
        changed.setdefault(kind, []).append(block)
    return tuple(Difference(kind, len(blocks), _owners(first, sorted(blocks))) for kind, blocks in changed.items())


def _checksums(manifest: Manifest) -> Iterator[tuple[tuple[str, int], bytes]]:
    """Every block by kind and number."""
    for _, segment in manifest.segments:
        for number in range(segment.count):
            place = number * CHECKSUM_BYTES
            yield (segment.kind, segment.first + number), segment.checksums[place : place + CHECKSUM_BYTES]


def _owners(manifest: Manifest, blocks: list[int]) -> tuple[str, ...]:
    block, found = manifest.layout.block, dict[str, None]()
    ranges = [Range(number * block, (number + 1) * block) for number in blocks]
    for entry in manifest.layout.entries:
        if any(len(entry.range.meet(part)) for part in ranges):
            found[entry.spec.name] = None
    return tuple(found)
