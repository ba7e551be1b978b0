"""Bytes per rank and bytes on the wire, before anything runs: what `blueprint.py` works out, of all ranks together.

Torch-free: shapes and settings are enough.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_engine.blueprint import Blueprint
from zero_engine.config import ZeroConfig
from zero_engine.fold import Schedule
from zero_engine.layout import Layout


@dataclass(frozen=True)
class Plan:
    """What a step will take, rank by rank."""

    stage: int
    ranks: int
    num_parameters: int
    padded_parameters: int
    memory: tuple[dict[str, int], ...]  # bytes by category, for each rank
    traffic: tuple[dict[str, int], ...]  # payload bytes sent per step by "collective/purpose", for each rank
    schedule: Schedule
    idle_share: float
    paper_bytes: float  # per rank, from the paper's formula for this stage and precision
    device: str = "cpu"
    updated_elements: int = 0  # of the rank that updates most
    copied_bytes: int = 0  # own weights that a rank copies into slots in a step, of the rank that copies most
    moments: int = 2  # fp32 optimizer states per parameter

    @property
    def largest_memory(self) -> int:
        """Bytes of the fullest rank, host memory too."""
        return max(sum(row.values()) for row in self.memory)

    @property
    def largest_device_memory(self) -> int:
        """Bytes on the device of the fullest rank: pinned memory is the host's, which on a CPU is the same."""
        apart = self.device == "cuda"
        return max(sum(count for name, count in row.items() if not (apart and name == "pinned")) for row in self.memory)

    @property
    def largest_traffic(self) -> int:
        """Bytes sent per step by the busiest rank."""
        return max(sum(row.values()) for row in self.traffic)

    @property
    def total_traffic(self) -> int:
        """Bytes sent per step by all ranks."""
        return sum(sum(row.values()) for row in self.traffic)


def plan_of(
    layout: Layout,
    config: ZeroConfig,
    ranks: int,
    *,
    transport: str = "shared",
    device: str = "cpu",
    moments: int = 2,
) -> Plan:
    """Memory and traffic of `ranks` ranks. `transport`: what "auto" becomes, shared on one CPU node, else group."""
    return plan_from(Blueprint(layout, config, ranks, transport, device, moments))


def plan_from(blueprint: Blueprint) -> Plan:
    """The whole picture, of all ranks."""
    config, layout, ranks = blueprint.config, blueprint.layout, range(blueprint.ranks)
    return Plan(
        config.stage,
        blueprint.ranks,
        layout.num_parameters,
        layout.padded,
        tuple(blueprint.sizes(rank).memory for rank in ranks),
        tuple(blueprint.traffic(rank) for rank in ranks),
        blueprint.schedule,
        blueprint.schedule.idle_share,
        layout.num_parameters * paper_bytes_per_parameter(config.stage, blueprint.ranks, config.precision),
        blueprint.device,
        blueprint.updated_elements,
        blueprint.copied_bytes,
        blueprint.num_moments,
    )


def paper_bytes_per_parameter(stage: int, ranks: int, precision: str = "bf16") -> float:
    """The ZeRO paper's model states (arXiv 1910.02054, figure 1, K = 12); in fp32, 4 + 4 + 8 in place of 2 + 2 + 12."""
    weights, gradients, states = (4, 4, 8) if precision == "fp32" else (2, 2, 12)
    divided = {0: 0, 1: states, 2: states + gradients, 3: states + gradients + weights}[stage]
    return weights + gradients + states - divided + divided / ranks
