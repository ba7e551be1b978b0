"""File calls that are counted before they change the disk: what a death at every boundary is enumerated with.

Importable in rank and writer processes too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from zero_engine.file_calls import FileCalls


@dataclass
class CountedCalls(FileCalls, ABC):
    """Lets `allowed` calls that change the disk pass, and dies before the next, in the way of the subclass."""

    allowed: int
    write_bytes = 4096  # so that a small shard takes many writes, one of them under way while the next is filled

    @abstractmethod
    def die(self) -> None:
        """End here."""

    def count(self) -> None:
        """One more call is about to change the disk."""
        self.allowed -= 1
        if self.allowed < 0:
            self.die()

    def open(self, path: Path) -> int:
        self.count()
        return super().open(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        self.count()
        return super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self.count()
        super().sync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self.count()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self.count()
        super().unlink(path)

    def make_folder(self, path: Path) -> None:
        self.count()
        super().make_folder(path)

    def remove_folder(self, path: Path) -> None:
        self.count()
        super().remove_folder(path)
