"""From a module to the flat space: its specs, and parameters as views into storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from zero_engine import released
from zero_engine.adamw import Optimizer
from zero_engine.blueprint import Blueprint
from zero_engine.errors import ModelError
from zero_engine.layout import ITEM_BYTES, Entry, Layout, ParameterSpec, Piece, Range
from zero_engine.units import find_units

TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layout_of(model: nn.Module, units: tuple[type | str, ...], optimizer: Optimizer) -> Layout:
    """The layout of a model; works on the meta device too. Raises ModelError for parameters it cannot train."""
    names = names_of(model)
    parameters = {first: model.get_parameter(first) for first in names}
    owners = find_units(model, units)
    groups = optimizer.groups_of(parameters, names)
    specs = []
    for (name, aliases), parameter, group in zip(names.items(), parameters.values(), groups, strict=True):
        dtype = str(parameter.dtype).removeprefix("torch.")
        if (parameter.requires_grad and parameter.dtype not in TRAINABLE_DTYPES) or dtype not in ITEM_BYTES:
            raise ModelError(f"parameter '{name}' is {dtype}; train float32, bfloat16 or float16 parameters only")
        unit = _owner((name, *aliases), owners)
        specs.append(ParameterSpec(name, tuple(parameter.shape), dtype, unit, group, parameter.requires_grad, aliases))
    return Layout.build(specs)


def names_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """First name of every distinct parameter, with its other names."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return {names[0]: tuple(names[1:]) for names in found.values()}


def _owner(names: tuple[str, ...], units: dict[str, nn.Module]) -> str:
    """The one unit in which all names stand, else "" (the root unit)."""
    owners = {next((unit for unit in units if name.startswith(unit + ".")), "") for name in names}
    return owners.pop() if len(owners) == 1 else ""


class Storage:
    """Compute weights of a stretch of units: typed flat views of each run, over one byte tensor."""

    def __init__(self, blueprint: Blueprint, units: range, data: Tensor) -> None:
        self._blueprint, self._data = blueprint, data
        self._starts: dict[int, int] = {}
        position = 0
        for unit in units:
            for run in blueprint.layout.units[unit].runs:
                self._starts[run] = position
                position += len(blueprint.layout.runs[run].range) * blueprint.run_item_bytes(run)

    def byte_of(self, run: int, element: int) -> int:
        """Where flat element `element` of `run` starts (or ends, for the end of the run)."""
        inside = element - self._blueprint.layout.runs[run].start
        return self._starts[run] + inside * self._blueprint.run_item_bytes(run)

    def run(self, run: int) -> Tensor:
        """1-D view of a whole run in its compute dtype."""
        layout = self._blueprint.layout.runs[run]
        dtype = compute_dtype(self._blueprint, run)
        return self._data[self.byte_of(run, layout.start) : self.byte_of(run, layout.stop)].view(dtype)

    def piece(self, piece: Piece) -> Tensor:
        """1-D view of a piece."""
        start = piece.range.start - self._blueprint.layout.runs[piece.run].start
        return self.run(piece.run)[start : start + len(piece.range)]

    def fill(self, unit: int, value_of: Callable[[Entry], Tensor]) -> None:
        """Write the parameters of a unit, rounded to their compute dtype, and zeros in the padding."""
        for run in self._blueprint.layout.units[unit].runs:
            write_values(self._blueprint.layout, run, self._blueprint.layout.runs[run].range, self.run(run), value_of)

    def attach(self, unit: int, parameters: Sequence[nn.Parameter]) -> None:
        """Turn the parameters (by number) of a unit into views."""
        for entry in self._blueprint.layout.entries_of(unit):
            parameters[entry.ordinal].data = self.view(entry)
            released.name(parameters[entry.ordinal], entry.spec.name)

    def view(self, entry: Entry) -> Tensor:
        """A parameter in its shape."""
        run = self._blueprint.layout.runs[entry.run]
        start = entry.start - run.start
        return self.run(entry.run)[start : start + entry.spec.numel].view(entry.spec.shape)


def compute_dtype(blueprint: Blueprint, run: int) -> torch.dtype:
    """The dtype in which a run's parameters compute."""
    declared = blueprint.layout.runs[run].dtype
    dtype = getattr(torch, blueprint.config.compute_dtype if declared == "float32" else declared)
    assert isinstance(dtype, torch.dtype)
    return dtype


def write_values(layout: Layout, run: int, part: Range, target: Tensor, value_of: Callable[[Entry], Tensor]) -> None:
    """Fill `target` with the values of flat elements `part` of `run`, zeros in the padding."""
    target.zero_()
    for entry in layout.entries_of(layout.runs[run].unit):
        common = entry.range.meet(part)
        if entry.run == run and len(common):
            values = value_of(entry).detach().reshape(-1)[common.start - entry.start : common.stop - entry.start]
            target[common.start - part.start : common.stop - part.start].copy_(values)


def gaps_of(layout: Layout, run: int) -> list[tuple[int, int]]:
    """Padding inside a run: (start, stop) elements counted from the start of the run."""
    first, gaps, end = layout.runs[run].start, list[tuple[int, int]](), layout.runs[run].start
    for entry in (item for item in layout.entries_of(layout.runs[run].unit) if item.run == run):
        if entry.start > end:
            gaps.append((end - first, entry.start - first))
        end = entry.range.stop
    if layout.runs[run].stop > end:
        gaps.append((end - first, layout.runs[run].stop - first))
    return gaps
