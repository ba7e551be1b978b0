"""Everything an engine builds around its module: memory, the stage's parts, hooks.

Built once around a layout, and again, around the weights that are there, when parameters are frozen or unfrozen.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import finalize

import torch
from torch import nn

from zero_engine.activations import Activations
from zero_engine.adamw import Optimizer
from zero_engine.arenas import Arenas
from zero_engine.blueprint import Blueprint
from zero_engine.buffers import BufferWatch
from zero_engine.comm import Comm
from zero_engine.config import ZeroConfig
from zero_engine.first_values import FirstValues
from zero_engine.hooks import ModuleHooks
from zero_engine.layout import Layout
from zero_engine.mail import Mailbox
from zero_engine.pieces import Pieces
from zero_engine.precision import InputCast
from zero_engine.stages import STRATEGIES
from zero_engine.strategy import Setting
from zero_engine.trace import PhaseClock
from zero_engine.weight_watch import WeightWatch


class Assembly:
    """The parts of one engine around one layout; `take_down` takes the hooks out of the module again."""

    def __init__(
        self,
        module: nn.Module,
        parameters: tuple[nn.Parameter, ...],
        layout: Layout,
        config: ZeroConfig,
        optimizer: Optimizer,
        comm: Comm,
        device: torch.device,
        first: FirstValues,
    ) -> None:
        """`parameters`: by number. `config`: resolved. `first`: where the first weights come from."""
        self.arenas = Arenas(comm, device)
        self.blueprint = Blueprint(layout, config, comm.ranks, comm.name, device.type, len(optimizer.moments))
        sizes = self.blueprint.sizes(comm.rank)
        scratch = self.arenas.take("other", sizes.scratch)
        self.mailbox = Mailbox(self.blueprint, comm, self.arenas)
        self.strategy = STRATEGIES[config.stage](
            Setting(self.blueprint, comm, self.arenas, optimizer, parameters, device, scratch, self.mailbox, first)
        )
        self.master = self.strategy.make_master()
        self.synchronizer = self.strategy.make_synchronizer()
        comm.reserve(self.arenas.take("other", sizes.staging), self.blueprint.slice)
        self.clock = PhaseClock()
        names = [unit.name for unit in layout.units[1:]]
        pieces = Pieces(self.blueprint, self.arenas)
        self.hooks = ModuleHooks(module, names, parameters, self.strategy, self.synchronizer, pieces, self.clock)
        self.synchronizer.on_shortage(self.hooks.make_room)
        self.trainable = [entry.spec.trainable for entry in layout.canonical_entries]
        activations = Activations([module.get_submodule(name) for name in names], config.activation_checkpointing)
        cast = InputCast(module, getattr(torch, config.compute_dtype))
        self.buffers = BufferWatch(module, config.buffers == "local" or comm.ranks == 1)
        self.take_down = finalize(self, _call_all, self.hooks.remove, activations.remove, cast.remove)
        self.take_down.atexit = False  # once: by the engine, or when nobody has it any more
        self.weights = WeightWatch(module, parameters, [entry.spec.name for entry in layout.canonical_entries])


def _call_all(*calls: Callable[[], None]) -> None:
    for call in calls:
        call()
