"""What a save costs without its digest and checksums: for `checkpoint.py`, which compares. Never for a checkpoint."""

from __future__ import annotations

from zero_engine import shard
from zero_engine.store import LocalStore
from zero_engine.writer import Examined


class Unchecked(LocalStore):
    """A store whose writer process, once it has begun a file here, hashes nothing any more. Loads no torch."""

    def create(self, key: str):  # type: ignore[no-untyped-def]
        shard.block_checksums = lambda data, block_bytes: bytes(8 * (len(data) // block_bytes))
        return super().create(key)


def unexamined(*given: object) -> Examined:
    """Stands for the look at a copy."""
    return Examined(0)
