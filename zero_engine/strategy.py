"""The two roles a ZeRO stage plays, and what it is given to play them with.

The engine calls every method at every stage; a stage that has nothing to do at a point does nothing there. Read
`stage0.py` to `stage3.py` next: each adds one thing to the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zero_engine.adamw import Optimizer
from zero_engine.arenas import Arenas
from zero_engine.blueprint import Blueprint, Sizes
from zero_engine.comm import Comm
from zero_engine.copies import copies_of
from zero_engine.errors import UsageError
from zero_engine.first_values import FirstValues
from zero_engine.fold import Task
from zero_engine.layout import Piece, Range
from zero_engine.mail import Mailbox
from zero_engine.master import Master
from zero_engine.states import OnDevice, OnHost, OverBus, StateHome

Totals = Callable[[Piece, Range], Tensor]  # a piece and elements from its start -> 1-D fp32 unscaled sums


@dataclass(frozen=True)
class Setting:
    """What a strategy works with; made once per engine."""

    blueprint: Blueprint
    comm: Comm
    arenas: Arenas
    optimizer: Optimizer
    parameters: tuple[nn.Parameter, ...]  # by number
    device: torch.device
    scratch: Tensor  # 1-D uint8, 16 bytes per element that is folded at a time, 4 per one that is updated
    mailbox: Mailbox
    first: FirstValues

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def sizes(self) -> Sizes:
        """What this rank allocates."""
        return self.blueprint.sizes(self.comm.rank)

    def sizes_of_all(self, size: Callable[[Sizes], int]) -> list[int]:
        """One number of every rank's sizes, for a shared allocation."""
        return [size(self.blueprint.sizes(rank)) for rank in range(self.blueprint.ranks)]

    @cached_property
    def state_home(self) -> StateHome:
        """Where masters and moments go, and how sums come there."""
        stride = self.blueprint.stride
        if self.blueprint.over_bus:
            return OverBus(self.arenas, copies_of(self.device), stride, self.blueprint.return_slot)
        if self.blueprint.config.offload == "cpu":
            return OnHost(self.arenas, stride)
        return OnDevice(self.arenas, self.scratch[: 4 * self.blueprint.update_stride].view(torch.float32))

    def name_of(self, ordinal: int) -> str:
        """A parameter's name, by its number."""
        return self.blueprint.layout.canonical_entries[ordinal].spec.name


class ShardingStrategy(Protocol):
    """Who keeps what, and how weights come back together."""

    def __init__(self, setting: Setting) -> None: ...

    def make_master(self) -> Master:
        """Take over the parameters: allocate weights, masters and moments, and turn parameters into views."""

    def make_synchronizer(self) -> GradientSynchronizer:
        """Allocate gradients and sums; the strategy itself where it takes over gradient synchronisation."""

    def reduce_grads(self) -> Totals:
        """All pieces are folded: hand out the totals of what this rank updates; its weights may be written after."""

    def open_weights(self) -> None:
        """Wait until no other rank reads this rank's weights: they may be written, then `gather_weights`."""

    def frozen_weights(self) -> Iterator[tuple[Piece, Tensor]]:
        """The frozen pieces that this rank keeps, each 1-D: at stage 3 what it owns, elsewhere all."""

    def unit_updated(self, unit: int) -> None:
        """While the update runs: this rank's weights of units 0 to `unit` are as they will be."""

    def gather_weights(self) -> None:
        """The update is done: bring current weights to where compute needs them."""

    def post_step(self) -> None:
        """The step is over, applied or skipped."""

    # Windows in which a unit's weights are used. Called from module hooks.

    def before_forward(self, unit: int) -> None:
        """The unit's forward is about to run."""

    def after_forward(self, unit: int) -> None:
        """The unit's forward has run."""

    def before_backward(self, unit: int) -> None:
        """The unit's backward is about to run."""

    def stay(self, unit: int) -> None:
        """The unit runs again inside its backward; others may have run there before it."""


class GradientSynchronizer(Protocol):
    """How gradient leaves become folded totals."""

    def on_shortage(self, finish: Callable[[int], None]) -> None:
        """`finish(unit)` ends a unit before its turn: where leaves of another one need its memory."""

    def begin(self, task: Task) -> None:
        """A micro-batch starts."""

    def accept(self, ordinal: int, leaf: Tensor) -> None:
        """A gradient leaf of the running micro-batch (the parameter's shape, its compute dtype)."""

    def unit_done(self, unit: int) -> None:
        """No more leaves of this unit will come in this micro-batch."""

    def sync_gradients(self) -> None:
        """The micro-batch's last backward is over: its piece is complete."""

    def finish(self) -> int:
        """This rank's work is over: take part in the rounds that are left. Returns a bit per parameter with a leaf."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward calls inside are not the micro-batch's last: leaves stay local."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive between steps; empty at a step boundary."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over `state_dict`."""


class AtRest:
    """A synchronizer's answers where leaves always stay local until the last backward and nothing outlives a step."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert not state, state


def came_late(name: str) -> UsageError:
    """What is said of a gradient of parameter `name` whose unit has been reduced."""
    return UsageError(
        f"a gradient of '{name}' came after its unit was finished; with torch.utils.checkpoint, pass "
        "use_reentrant=False; gradients of gradients (create_graph=True) and graphs of an earlier micro-batch need "
        "stage 0 or 1 and transport 'shared', or one rank"
    )
