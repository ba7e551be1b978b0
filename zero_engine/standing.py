"""Whether weights stand where forward saw them: autograd itself is made to see it, by its version counters.

Note: why counters. At stage 3 units take turns in two slots, and what backward needs of a unit's weights are views into
its slot. A backward that comes to a unit by a way that no window knows would read another unit's weights, silently.
Autograd compares the version of every tensor that it has saved with the one that the tensor has now; so weights that
are away have another version, and such a backward ends with an error instead of wrong gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import nn

AWAY = 1 << 30  # added to the versions of weights that are away

NEEDED_AWAY = (
    "backward needs weights of a unit whose backward has not begun or is over (ZeRO stage 3): what its forward made "
    "reached the loss by another way than its output, as an attribute of the module, say, or as a gradient of its own "
    "(create_graph=True). Return it from the unit's forward, name larger units, or use stage 2; gradients of gradients "
    "need stage 0 or 1 and transport 'shared', or one rank"
)


class Standing:
    """The weights of one unit. They are away at first."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._versions: tuple[int, ...] = ()
        self.leave()

    def leave(self) -> None:
        """Another unit takes their slot, or they are about to change."""
        with _as_plain():
            versions = tuple(map(_version, self._parameters))
            if versions != self._versions:  # the first time, and after somebody wrote to them where they stood
                self._versions, self._away = versions, tuple(version + AWAY for version in versions)
            _set(self._parameters, self._away)

    def come(self) -> None:
        """They are in their slot, with the bits that forward saw."""
        with _as_plain():
            _set(self._parameters, self._versions)


def versions_of(parameters: Iterable[nn.Parameter]) -> list[int]:
    """How often each was written, wherever it is."""
    with _as_plain():
        return [version % AWAY for version in map(_version, parameters)]


def is_of_weights_away(error: RuntimeError) -> bool:
    """Whether autograd has found a saved weight away."""
    found = re.search(r"is at version (\d+); expected version", str(error))
    return found is not None and int(found[1]) >= AWAY


_version = attrgetter("_version")
_set = torch._C._autograd._unsafe_set_version_counter
_as_plain = torch._C.DisableTorchFunctionSubclass  # weights outside their window have counters too
