"""From module and autograd events to the strategy's windows and the synchroniser's leaves.

One hook per trainable tensor, three per unit, and nothing else grows with the model.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from zero_engine.errors import UsageError
from zero_engine.pieces import Pieces
from zero_engine.standing import NEEDED_AWAY, is_of_weights_away
from zero_engine.strategy import GradientSynchronizer, ShardingStrategy
from zero_engine.trace import PhaseClock
from zero_engine.windows import BackwardOrder

_WATCHED: WeakSet[nn.Module] = WeakSet()  # modules with the hooks of an engine


def require_unwatched(model: nn.Module) -> None:
    """Raises UsageError when an engine trains a part of the model already."""
    if not _WATCHED.isdisjoint(model.modules()):
        gc.collect()  # one that was dropped goes with its hooks
    if not _WATCHED.isdisjoint(model.modules()):
        raise UsageError("an engine trains this model already, or a part of it; call close() of that one first")


class ModuleHooks:
    """Watches one model while its engine lives."""

    def __init__(
        self,
        model: nn.Module,
        unit_names: Sequence[str],  # of units 1, 2, ... of the layout
        parameters: Sequence[nn.Parameter],  # by number
        strategy: ShardingStrategy,
        synchronizer: GradientSynchronizer,
        pieces: Pieces,
        clock: PhaseClock,
    ) -> None:
        self._strategy, self._synchronizer, self._clock, self._pieces = strategy, synchronizer, clock, pieces
        self._order = BackwardOrder(len(unit_names))
        self._names = ["the model", *unit_names]
        self.failure = ""  # the last exception that passed through a module, in words
        self._seen: BaseException | None = None
        self._training = False  # inside a micro-batch of a step
        self._running = False  # inside `run_backward`
        self._backward_unit: int | None = None  # the unit whose backward runs; None outside of backward
        self._given: dict[int, dict[int, Any]] = {}  # by unit inside its forward: what it was given, with its grad_fn
        self._handles: list[Any] = []
        self._handles.append(model.register_forward_hook(lambda *_: self._notice("the model"), always_call=True))
        for number, name in enumerate(unit_names, start=1):
            module = model.get_submodule(name)
            self._handles += [
                module.register_forward_pre_hook(self._before_forward(number), prepend=True, with_kwargs=True),
                module.register_forward_hook(self._after_forward(number), with_kwargs=True, always_call=True),
            ]
        for ordinal, parameter in enumerate(parameters):
            if parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook
                self._handles.append(register(self._leaf(ordinal)))
        self._modules = tuple(model.modules())
        _WATCHED.update(self._modules)

    def begin(self) -> None:
        """A micro-batch starts."""
        self._order.clear()
        self._training, self.failure = True, ""

    def run_backward(self, loss: Tensor, last: bool, retain_graph: bool) -> None:
        """One backward call; after the micro-batch's last one every unit is finished."""
        self._pieces.open = self._pieces.open or not last
        self._backward_unit, self._running = 0, True
        try:
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if not is_of_weights_away(error):
                raise
            raise UsageError(NEEDED_AWAY) from error
        finally:
            self._backward_unit, self._running = None, False
        if last:
            for unit in (*self._order.rest(), 0):
                self._finish(unit)
            self._pieces.close()
            self._training = False

    def make_room(self, unit: int) -> None:
        """The unit's bucket is needed for another: its turn comes now."""
        for number in self._order.force(unit):
            self._finish(number)

    def _finish(self, unit: int) -> None:
        for ordinal, piece in self._pieces.drain(unit):
            self._synchronizer.accept(ordinal, piece)
        with self._clock.phase("reduce"):
            self._synchronizer.unit_done(unit)

    def _before_forward(self, unit: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled():
                given = [each for value in (*args, *kwargs.values()) for each in tensors_in(value)]
                self._given[unit] = {id(each): each.grad_fn for each in given}
            with self._clock.phase("gather"):
                if self._backward_unit == unit:  # recomputed inside its own backward
                    self._strategy.stay(unit)
                else:
                    self._strategy.before_forward(unit)

        return hook

    def _after_forward(self, unit: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = self._given.pop(unit, {})
            if self._backward_unit == unit:
                return
            self._strategy.after_forward(unit)
            self._notice(self._names[unit])
            if not torch.is_grad_enabled():
                return
            own = [each for each in tensors_in(output) if each.requires_grad and not _is_passed(each, given)]
            if own:
                begins = self._before_backward(unit, self._order.record(unit)) if self._training else self._look(unit)
                for tensor in own:
                    tensor.register_hook(begins)  # type: ignore[no-untyped-call]

        return hook

    def _look(self, unit: int) -> Callable[[Tensor], None]:
        """Outside of engine.backward, where somebody wants the gradient of an input: the weights, and nothing else."""

        def hook(gradient: Tensor) -> None:
            self._strategy.before_backward(unit)
            self._strategy.after_forward(unit)

        return hook

    def _notice(self, name: str) -> None:
        """Remember the innermost module of an exception that passes through."""
        error = sys.exc_info()[1]
        if error is not None and error is not self._seen:
            self._seen = error
            self.failure = f"{type(error).__name__}: {error} (in module '{name}')"

    def _before_backward(self, unit: int, call: int) -> Callable[[Tensor], None]:
        look = self._look(unit)

        def hook(gradient: Tensor) -> None:
            if not self._running:  # somebody wants a gradient of their own, of an input, say
                look(gradient)
                return
            if not self._pieces.open:
                for number in self._order.reach(call):
                    self._finish(number)
            self._backward_unit = unit
            with self._clock.phase("gather"):
                self._strategy.before_backward(unit)

        return hook

    def _leaf(self, ordinal: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            leaf, parameter.grad = parameter.grad, None
            if not self._running:
                raise UsageError("a gradient arrived outside of engine.backward(loss): call that, not loss.backward()")
            assert leaf is not None
            target = self._pieces if self._pieces.open else self._synchronizer
            target.accept(ordinal, leaf)

        return hook

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _WATCHED.difference_update(self._modules)
        self._seen = None  # its frames hold what they were doing


def _is_passed(tensor: Tensor, given: dict[int, Any]) -> bool:
    """Whether a unit returns what it was given: the backward of that is none of its own. In place it made another."""
    return id(tensor) in given and given[id(tensor)] is tensor.grad_fn


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors in nested tuples, lists, dicts and objects with attributes."""
    if isinstance(value, Tensor):
        return [value]
    found, left, seen = list[Tensor](), [value], set[int]()
    while left:
        each = left.pop()
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, tuple | list):
            left += each
        elif isinstance(each, dict):
            left += each.values()
        elif not isinstance(each, nn.Module | type | str | int | float | None) and id(each) not in seen:
            seen.add(id(each))
            left += _attributes_of(each)
    return found


def _attributes_of(value: Any) -> list[Any]:
    slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for names in slots for name in ([names] if isinstance(names, str) else names)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)]
