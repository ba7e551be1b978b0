"""Which stage to take: least traffic that fits, then fewest bytes; and the sentence that says why. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zero_engine.config import STAGES, ZeroConfig
from zero_engine.layout import Layout
from zero_engine.plan import Plan, plan_of


@dataclass(frozen=True)
class Advice:
    """A stage, and the sentence that says why."""

    stage: int
    fits: bool
    reason: str
    plans: tuple[Plan, ...]  # of all stages


def advise(
    layout: Layout,
    config: ZeroConfig,
    ranks: int,
    device_bytes: int,
    *,
    activation_bytes: int = 0,
    margin: float = 0.1,
    transport: str = "shared",
    device: str = "cpu",
    moments: int = 2,
) -> Advice:
    """The stage with the least traffic that fits `device_bytes` less the margin, then with the fewest bytes."""
    plans = tuple(
        plan_of(layout, replace(config, stage=stage), ranks, transport=transport, device=device, moments=moments)
        for stage in STAGES
    )
    room = device_bytes * (1 - margin) - activation_bytes
    fitting = [plan for plan in plans if plan.largest_device_memory <= room]
    if not fitting:
        best = min(plans, key=lambda plan: plan.largest_device_memory)
        return Advice(best.stage, False, _too_large(best, room), plans)
    best = min(fitting, key=lambda plan: (plan.largest_traffic, plan.largest_device_memory))
    return Advice(best.stage, True, _why(best, plans, room, margin), plans)


def _too_large(best: Plan, room: float) -> str:
    return (
        f"No stage fits: even stage {best.stage} needs {_size(best.largest_device_memory)} per rank and {_size(room)} "
        "are free; use more ranks, a smaller model or larger devices."
    )


def _why(best: Plan, plans: Sequence[Plan], room: float, margin: float) -> str:
    equal = [p for p in plans if p.largest_traffic == best.largest_traffic and p.largest_device_memory <= room]
    rest = f"{_size(best.largest_device_memory)} of {_size(room)} per rank ({margin:.0%} kept free)"
    if best.ranks == 1:
        return f"Stage {best.stage}: one rank sends nothing at any stage, and it needs the fewest bytes, {rest}."
    if len(equal) > 1:
        return f"Stage {best.stage}: no other stage that fits sends less, and it needs the fewest bytes, {rest}."
    sent = _size(best.largest_traffic)
    return f"Stage {best.stage}: it sends the least of those that fit, {sent} a step, with {rest}."


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
