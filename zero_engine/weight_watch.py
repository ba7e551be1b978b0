"""Sees what was done to the model behind the engine's back: its own masters and shards would silently win over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zero_engine.errors import UsageError
from zero_engine.standing import versions_of


class WeightWatch:
    """Compares autograd's version counters, places in memory, and who is in the model.

    The engine itself writes through flat views, which have counters apart.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self._module, self._parameters, self._names = module, parameters, names
        self._known = _named(module)
        self.remember()

    def remember(self) -> None:
        """The weights are as the engine left them."""
        self._versions, self._places = versions_of(self._parameters), self._places_now()
        self._members = _Members(self._module)

    def check(self) -> None:
        """Raises UsageError naming the first parameter that was written or replaced since."""
        if not self._members.stand():
            self._check_members()
        if (now := versions_of(self._parameters)) != self._versions:
            raise UsageError(
                f"the values of parameter '{self._first(now, self._versions)}' were changed by something else than a "
                "step, and the engine's own copy of them would win; load weights before the engine is built, or with "
                "engine.load_full_state_dict(state)"
            )
        if (places := self._places_now()) != self._places:
            raise UsageError(
                f"parameter '{self._first(places, self._places)}' was given other memory (.data = ...), of which the "
                "engine knows nothing; load weights before the engine is built, or with "
                "engine.load_full_state_dict(state)"
            )

    def _check_members(self) -> None:
        """A module without parameters may be replaced; a parameter, and a module that has some, may not."""
        now = _named(self._module)
        for name in dict.fromkeys((*self._known, *now)):
            if now.get(name) is not self._known.get(name):
                what = "replaced" if name in now and name in self._known else "added" if name in now else "taken out"
                raise UsageError(
                    f"parameter '{name}' was {what} after the engine was built, which would not train it; change the "
                    "model first, then build the engine around it"
                )
        self._members = _Members(self._module)

    def _places_now(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [parameter.data_ptr() for parameter in self._parameters]

    def _first(self, now: Sequence[int], before: Sequence[int]) -> str:
        return next(n for n, a, b in zip(self._names, now, before, strict=True) if a != b)


def _named(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


class _Members:
    """Every parameter and module inside, as they stood when this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._holders: list[dict[str, Any]] = []
        for each in module.modules():
            self._holders += [each._parameters, each._modules]
        self._count = self._count_now()
        self._all = [(holder, name, member) for holder in self._holders for name, member in holder.items()]

    def stand(self) -> bool:
        """Whether they are the same now."""
        same = all(holder.get(name) is member for holder, name, member in self._all)
        return same and self._count_now() == self._count

    def _count_now(self) -> int:
        return sum(map(len, self._holders))
