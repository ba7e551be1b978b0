"""Which checkpoints of a job may go. Pure.

The newest two usable checkpoints always stay: if the latest turns out corrupt when it is read, the one before is there.
So do the newest two whose bytes were read back: a fault that damages every save from a moment on must not push out the
last that are known to be good. So does everything pinned: named by a paused or queued job, by a fork, or being read by
a living attempt.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

ALWAYS_KEPT = 2


@dataclass(frozen=True)
class Kept:
    """A checkpoint as retention sees it."""

    id: str
    step: int
    attempt: int
    usable: bool  # complete or verified, not corrupt
    pinned: bool = False
    verified: bool = False  # usable, and every byte was read back since it was published
    eval_loss: float | None = None


@dataclass(frozen=True)
class Keeping:
    """What a spec asks to keep."""

    latest: int = ALWAYS_KEPT
    best: int = 0  # by validation loss, however old; one of the latest may be one of them
    every: int = 0  # steps; 0: none


def removable(checkpoints: Sequence[Kept], keeping: Keeping, held: Collection[str] = ()) -> tuple[str, ...]:
    """Ids to remove, oldest first. `held` are checkpoints that something refers to now.

    A corrupt one goes once enough newer usable ones exist; until then it stays as evidence.
    """
    usable = sorted((c for c in checkpoints if c.usable), key=_age, reverse=True)
    kept = {c.id for c in usable[: max(keeping.latest, ALWAYS_KEPT)]}
    kept |= {c.id for c in [each for each in usable if each.verified][:ALWAYS_KEPT]}
    kept |= {c.id for c in _best(usable, keeping.best)}
    kept |= {c.id for c in usable if keeping.every and c.step % keeping.every == 0}
    kept |= {c.id for c in checkpoints if c.pinned} | set(held)
    if len(usable) < ALWAYS_KEPT:
        kept |= {c.id for c in checkpoints}
    return tuple(c.id for c in sorted(checkpoints, key=_age) if c.id not in kept and not _newer_than(c, usable))


def _age(checkpoint: Kept) -> tuple[int, int]:
    return (checkpoint.attempt, checkpoint.step)


def _best(usable: Sequence[Kept], keep_best: int) -> list[Kept]:
    scored = [c for c in usable if c.eval_loss is not None and not math.isnan(c.eval_loss)]
    return sorted(scored, key=lambda c: (c.eval_loss, -c.step))[:keep_best]


def _newer_than(checkpoint: Kept, usable: Sequence[Kept]) -> bool:
    """Whether a corrupt checkpoint has fewer than two usable ones after it."""
    return not checkpoint.usable and sum(_age(c) > _age(checkpoint) for c in usable) < ALWAYS_KEPT
