"""Element-wise optimizers beside AdamW, the user's own ones, and an average of weights as one more state.

Every update works on 1-D fp32 stretches of any cut, so each is sharded, saved, resharded and digested as AdamW is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zero_engine.adamw import Grouped, Optimizer, Update
from zero_engine.errors import ConfigError

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class AdamUpdate:
    """Adam with the decay added to the gradient (Kingma and Ba, arXiv 1412.6980), as `torch.optim.Adam`."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    def __call__(self, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: int, lr: float) -> None:
        beta1, beta2 = self.betas
        if self.weight_decay:
            gradient = gradient.add(weight, alpha=self.weight_decay)
        moments[0].lerp_(gradient, 1 - beta1)
        moments[1].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (moments[1].sqrt() / (1 - beta2**step) ** 0.5).add_(self.eps)
        weight.addcdiv_(moments[0], denominator, value=-lr / (1 - beta1**step))


class Adam(Grouped):
    """Adam; `groups` as for AdamW, with lr, betas, eps, weight_decay."""

    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(AdamUpdate(lr, betas, eps, weight_decay), groups)


@dataclass(frozen=True)
class SGDUpdate:
    """Momentum as `torch.optim.SGD` with dampening 0: the buffer starts as the first gradient."""

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool

    def __call__(self, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: int, lr: float) -> None:
        if self.weight_decay:
            gradient = gradient.add(weight, alpha=self.weight_decay)
        if moments:
            buffer = moments[0].copy_(gradient) if step == 1 else moments[0].mul_(self.momentum).add_(gradient)
            gradient = gradient.add(buffer, alpha=self.momentum) if self.nesterov else buffer
        weight.add_(gradient, alpha=-lr)


class SGD(Grouped):
    """SGD; `groups` as for AdamW, with lr, momentum, weight_decay, nesterov. Without momentum it keeps no state."""

    def __init__(
        self,
        lr: float = 1e-2,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(SGDUpdate(lr, momentum, weight_decay, nesterov), groups)
        if any(group.nesterov and not group.momentum for group in self._groups):
            raise ConfigError("optimizer nesterov is True and momentum 0; use a momentum as 0.9, or nesterov=False")
        self.moments: tuple[str, ...] = ("momentum_buffer",) if any(group.momentum for group in self._groups) else ()


@dataclass(frozen=True)
class LionUpdate:
    """Lion (Chen et al., arXiv 2302.06675, algorithm 2)."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float

    def __call__(self, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: int, lr: float) -> None:
        beta1, beta2 = self.betas
        direction = torch.lerp(gradient, moments[0], beta1).sign_()
        weight.mul_(1 - lr * self.weight_decay).add_(direction, alpha=-lr)
        moments[0].lerp_(gradient, 1 - beta2)


class Lion(Grouped):
    """Lion; `groups` as for AdamW, with lr, betas, weight_decay."""

    moments: tuple[str, ...] = ("exp_avg",)

    def __init__(
        self,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(LionUpdate(lr, betas, weight_decay), groups)


@dataclass(frozen=True)
class ElementWiseUpdate:
    """One step of a torch.optim class."""

    kind: str
    settings: str
    moments: tuple[str, ...]
    factory: Factory = field(repr=False)

    def __call__(self, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: int, lr: float) -> None:
        parameter = nn.Parameter(weight)
        parameter.grad = gradient
        optimizer = self.factory([parameter])
        optimizer.param_groups[0]["lr"] = lr
        if step > 1:
            known = dict(zip(self.moments, moments, strict=True))
            optimizer.state[parameter] = {**known, "step": torch.tensor(float(step - 1), dtype=torch.float32)}
        optimizer.step()
        for name, moment in zip(self.moments, moments, strict=True):
            value = optimizer.state[parameter][name]
            if value.data_ptr() != moment.data_ptr():
                moment.copy_(value)


class ElementWise:
    """A torch.optim class of the user's own, run on flat stretches: `ElementWise(lambda p: MyOptimizer(p, lr=0.1))`.

    It must treat every element alone (no norms over a tensor, no factored states) and keep its state in tensors of the
    parameter's shape and a `step`. `ElementWise` checks both on a small tensor and raises ConfigError otherwise.
    """

    def __init__(self, factory: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        try:
            optimizer = _stepped(factory, [1.0] * 4, [[1.0] * 4])
            self.moments: tuple[str, ...] = _state_names(optimizer)
            _require_element_wise(factory)
            (group,) = optimizer.param_groups
            self._lr = float(group["lr"])
        except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
            raise ConfigError(f"ElementWise: the optimizer cannot step a 1-D fp32 tensor by itself: {error}") from error
        settings = {name: value for name, value in group.items() if name != "params"}
        self._update = ElementWiseUpdate(type(optimizer).__name__, repr(settings), self.moments, factory)

    def groups_of(self, parameters: Mapping[str, nn.Parameter], aliases: Mapping[str, tuple[str, ...]]) -> list[int]:
        return [0] * len(parameters)

    def updates(self) -> list[tuple[Update, float]]:
        return [(self._update, self._lr)]


class EMA:
    """Another optimizer, with an exponential moving average of the weights as one more state named "ema".

    The average starts at the initial weights. `engine.full_state_dict(kind="ema")` gives it whole.
    """

    def __init__(self, optimizer: Optimizer, decay: float) -> None:
        if not 0 < decay < 1:
            raise ConfigError(f"EMA decay is {decay}; use a number between 0 and 1, such as 0.999")
        self._inner, self._decay = optimizer, decay
        self.moments: tuple[str, ...] = (*optimizer.moments, "ema")

    def groups_of(self, parameters: Mapping[str, nn.Parameter], aliases: Mapping[str, tuple[str, ...]]) -> list[int]:
        return self._inner.groups_of(parameters, aliases)

    def updates(self) -> list[tuple[Update, float]]:
        return [(AveragedUpdate(self._decay, update), lr) for update, lr in self._inner.updates()]


@dataclass(frozen=True)
class AveragedUpdate:
    """Another update, and the average after it: the last moment."""

    decay: float
    inner: Update

    def __call__(self, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: int, lr: float) -> None:
        if step == 1:
            moments[-1].copy_(weight)
        self.inner(weight, gradient, moments[:-1], step, lr)
        moments[-1].lerp_(weight, 1 - self.decay)


def _stepped(factory: Factory, values: list[float], gradients: list[list[float]]) -> torch.optim.Optimizer:
    """An optimizer that has made a step with each of the gradients; its one parameter has the result."""
    parameter = nn.Parameter(torch.tensor(values, dtype=torch.float32))
    optimizer = factory([parameter])
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
    return optimizer


def _values(optimizer: torch.optim.Optimizer) -> Tensor:
    (parameter,) = optimizer.param_groups[0]["params"]
    assert isinstance(parameter, Tensor)
    return parameter.detach()


def _state_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Of the tensors that it keeps for its one parameter. Raises ConfigError for a state of another kind."""
    names, kind, shape = list[str](), type(optimizer).__name__, _values(optimizer).shape
    for name, value in next(iter(optimizer.state.values()), {}).items():
        if isinstance(value, Tensor) and value.shape == shape:
            if value.dtype != torch.float32:
                kept = str(value.dtype).removeprefix("torch.")
                raise ConfigError(f"ElementWise: state '{name}' of {kind} is {kept}; the engine keeps them in fp32")
            names.append(name)
        elif name != "step" and value is not None:
            raise ConfigError(f"ElementWise: state '{name}' of {kind} is no tensor of the parameter's shape")
    return tuple(names)


def _require_element_wise(factory: Factory) -> None:
    """Two elements stepped together must equal the same elements stepped alone."""
    together = _stepped(factory, [0.5, -2.0], [[0.1, 30.0], [-0.2, 4.0]])
    alone = [_stepped(factory, [0.5], [[0.1], [-0.2]]), _stepped(factory, [-2.0], [[30.0], [4.0]])]
    if not torch.equal(_values(together), torch.cat([_values(each) for each in alone])):
        raise ConfigError(
            f"ElementWise: in {type(together).__name__} an element's update depends on other elements, so shards would "
            "change it"
        )
