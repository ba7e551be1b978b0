"""AdamW on flat shards, element by element (Loshchilov and Hutter, arXiv 1711.05101)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import combinations
from math import inf
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zero_engine.errors import ConfigError


class Update(Protocol):
    """One element-wise update; the result of an element must not depend on where a cut falls."""

    def __call__(self, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: int, lr: float) -> None:
        """Update `weight` and `moments` in place (1-D fp32, equal lengths); `step` counts from 1."""


class Optimizer(Protocol):
    """What the engine needs of an optimizer."""

    moments: tuple[str, ...]  # names of the fp32 state tensors

    def groups_of(self, parameters: Mapping[str, nn.Parameter], aliases: Mapping[str, tuple[str, ...]]) -> list[int]:
        """The group of each parameter, in the order given."""

    def updates(self) -> list[tuple[Update, float]]:
        """The update and the learning rate of each group."""


def shardable(optimizer: Optimizer | None) -> Optimizer:
    """The optimizer given, AdamW where none is. Raises ConfigError for an object of another kind, such as torch.s."""
    if optimizer is None:
        return AdamW()
    if isinstance(optimizer, type):
        name = optimizer.__name__
        raise ConfigError(f"optimizer is the class {name}; give an optimizer made of it, such as {name}(lr=1e-3)")
    if not all(hasattr(optimizer, name) for name in ("moments", "groups_of", "updates")):
        kind = type(optimizer).__name__
        raise ConfigError(
            f"optimizer is a {type(optimizer).__module__.partition('.')[0]} {kind}; give AdamW, Adam, SGD or Lion of "
            f"zero_engine, or ElementWise(lambda parameters: {kind}(parameters, ...)) for a class of your own"
        )
    return optimizer


def learning_rates(optimizer: Optimizer, lr: float | Sequence[float] | None) -> list[float]:
    """The rate of each group: one number for all, one each (the last group's may be left out), or None for its own."""
    own = [each for _, each in optimizer.updates()]
    if lr is None:
        return own
    given = [float(each) for each in (lr if isinstance(lr, Sequence) else [lr] * len(own))]
    if len(given) not in (len(own), len(own) - 1):
        raise ConfigError(f"lr has {len(given)} numbers for {len(own)} optimizer groups; give one per group")
    for each in given:
        if not _at_least_0(each):
            raise ConfigError(f"lr of a step is {each}; use a finite number of at least 0")
    return [*given, *own[len(given) :]]


Members = Callable[[str, nn.Parameter], bool] | Iterable[nn.Parameter | str]


@dataclass(frozen=True)
class AdamWUpdate:
    """The settings of one group, and the arithmetic.

    `fused=False` is the arithmetic of `torch.optim.AdamW(foreach=False, fused=False)`, `fused=True` that of
    `torch.optim.AdamW(fused=True)`, each bit for bit. Both are equal on any cut of the tensors.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    fused: bool

    def __call__(self, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: int, lr: float) -> None:
        (self._fused if self.fused else self._plain)(weight, gradient, moments, step, lr)

    def _fused(self, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: int, lr: float) -> None:
        torch._fused_adamw_(
            [weight],
            [gradient],
            [moments[0]],
            [moments[1]],
            [],
            [_step_tensor(step, weight.device)],
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def _plain(self, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: int, lr: float) -> None:
        beta1, beta2 = self.betas
        weight.mul_(1 - lr * self.weight_decay)
        moments[0].lerp_(gradient, 1 - beta1)
        moments[1].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (moments[1].sqrt() / (1 - beta2**step) ** 0.5).add_(self.eps)
        weight.addcdiv_(moments[0], denominator, value=-lr / (1 - beta1**step))


@lru_cache(maxsize=8)
def _step_tensor(step: int, device: torch.device) -> Tensor:
    """The step as the fused kernel wants it, which only reads it: one for all the cuts of a step."""
    # a fill: copying a number to a GPU would wait for it
    return torch.full((), float(step), dtype=torch.float32, device=device)


class Grouped:
    """Parameters by group: those that a group names, in the order given, and the others in a last group."""

    def __init__(self, base: Any, groups: Sequence[Mapping[str, Any]]) -> None:
        self._members = [_members(dict(group)) for group in groups]
        self._names = [_names(group["params"]) for group in groups]
        _require_disjoint([_listed(group["params"]) for group in groups])
        self._groups = [*(_checked(base, dict(group)) for group in groups), _in_range(base)]

    def groups_of(self, parameters: Mapping[str, nn.Parameter], aliases: Mapping[str, tuple[str, ...]]) -> list[int]:
        """The group of each parameter, in the order given."""
        known = {name for names in aliases.values() for name in names} | parameters.keys()
        for index, names in enumerate(self._names):
            if missing := sorted(names - known):
                raise ConfigError(f"optimizer group {index} names {missing[0]!r}, which is no parameter of the model")
        return [self._group_of(name, parameter, aliases[name]) for name, parameter in parameters.items()]

    def _group_of(self, name: str, parameter: nn.Parameter, aliases: tuple[str, ...]) -> int:
        for index, belongs in enumerate(self._members):
            if any(belongs(each, parameter) for each in (name, *aliases)):
                return index
        return len(self._members)

    def updates(self) -> list[tuple[Update, float]]:
        """The update and the learning rate of each group."""
        return [(group, group.lr) for group in self._groups]


class AdamW(Grouped):
    """AdamW with decoupled weight decay, one or several groups.

    `groups` is a list of dicts: "params" (parameters, name patterns such as "*.bias", or a function of (name,
    parameter)) and any of lr, betas, eps, weight_decay, fused. Groups keep the order given, and of several that a
    pattern puts a parameter in the first counts; those of no group follow in a last one with the settings of the call.
    `engine.step(lr=[...])` takes one number per group.
    """

    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        groups: Sequence[Mapping[str, Any]] = (),
        fused: bool = True,
    ) -> None:
        super().__init__(AdamWUpdate(lr, betas, eps, weight_decay, fused), groups)


def _members(group: Mapping[str, Any]) -> Callable[[str, nn.Parameter], bool]:
    if "params" not in group:
        raise ConfigError(f'an optimizer group has {sorted(group)} and no "params"; say which parameters are in it')
    members: Members = group["params"]
    if callable(members):
        return members
    listed = list(members)
    patterns = [item for item in listed if isinstance(item, str)]
    identities = {id(item) for item in listed if not isinstance(item, str)}
    return lambda name, parameter: id(parameter) in identities or any(fnmatchcase(name, each) for each in patterns)


def _names(members: Members) -> set[str]:
    """What is no pattern: a recipe's "*.bias" may fit nothing in some models, but a name has to be there."""
    return {item for item in _listed(members).values() if isinstance(item, str)}


def _listed(members: Members) -> dict[str | int, nn.Parameter | str]:
    """Parameters and names, no patterns, each by what tells it from the others."""
    listed = () if callable(members) else members
    exact = [item for item in listed if not (isinstance(item, str) and set(item) & set("*?["))]
    return {item if isinstance(item, str) else id(item): item for item in exact}


def _require_disjoint(groups: Sequence[Mapping[str | int, nn.Parameter | str]]) -> None:
    """Of what patterns fit the first counts; what is named twice is a mistake, as for torch. Raises ConfigError."""
    for (number, one), (later, other) in combinations(enumerate(groups), 2):
        for key in one.keys() & other.keys():
            item = one[key]
            what = repr(item) if isinstance(item, str) else f"a parameter of shape {tuple(item.shape)}"
            raise ConfigError(f"optimizer groups {number} and {later} both have {what}; put it in one of them")


def _checked(base: Any, group: dict[str, Any]) -> Any:
    group.pop("params")
    known = {field.name for field in fields(base)}
    if set(group) - known:
        wrong = sorted(set(group) - known)
        raise ConfigError(f"an optimizer group has unknown keys {wrong}; use {['params', *sorted(known)]}")
    return _in_range(replace(base, **group))


def _in_range(settings: Any) -> Any:
    """The settings of one group, each where its arithmetic holds; ConfigError names the first that is not."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        fits, words = _RANGES[field.name]
        if not fits(value):
            raise ConfigError(f"optimizer {field.name} is {value!r}; use {words}")
    return settings


def _at_least_0(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < inf


def _below_1(value: Any) -> bool:
    return _at_least_0(value) and bool(value < 1)


def _two_below_1(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_below_1, value))


_AT_LEAST_0 = (_at_least_0, "a finite number of at least 0")
_YES_OR_NO = (lambda value: isinstance(value, bool), "True or False")
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": _AT_LEAST_0,
    "eps": _AT_LEAST_0,
    "weight_decay": _AT_LEAST_0,
    "momentum": (_below_1, "a number from 0 below 1"),
    "betas": (_two_below_1, "two numbers from 0 below 1"),
    "fused": _YES_OR_NO,
    "nesterov": _YES_OR_NO,
}
