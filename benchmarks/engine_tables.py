"""How the engine's cost grows, and what its options cost: tables for the page of the engine.

    python benchmarks/engine_tables.py [--only growth,tensors,host,checkpointing,offload] [--rounds 5]

growth: seconds of a step beyond the model's own forward and backward, per byte that the plan says is sent, from 4 M to
200 M parameters on 2 ranks. tensors: the same for 8 M parameters in 10 to 1,000 tensors. host: a step of a model so
narrow that kernels cost nothing, one rank, 12 layers, beyond its forward and backward: an upper bound of the engine's
host time. checkpointing: step and activations of the policies. offload: step at stage 1 with and without. All engines
of a table take turns, step by step; medians, minima in parentheses.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, SMALL, Size, loss_of
from ranks import machine, run_ranks
from torch import Tensor, nn

WARMUP = 2
Step = Callable[[], Any]


class Layers(nn.Module):
    """Square layers without bias in units of equal size; little compute for many bytes."""

    def __init__(self, units: int, layers: int, width: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(
            nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))) for _ in range(units)
        )

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x).tanh()
        return x.square().mean()


def engine_step(model: nn.Module, config: dict[str, Any], inputs: Sequence[Tensor], micro_batches: int = 1) -> Step:
    """One step of the engine on `model(*inputs)`, which gives a loss."""
    from zero_engine import AdamW, Engine, ZeroConfig

    total = micro_batches * (dist.get_world_size() if dist.is_initialized() else 1)
    engine = Engine(model, ZeroConfig(**{"micro_batches": total, "chunk": micro_batches} | config), AdamW())

    def step() -> Any:
        for _ in engine.micro_batches():
            engine.backward(model(*inputs))
        return engine.step()

    step.engine = engine  # type: ignore[attr-defined]
    return step


def compute_step(model: nn.Module, inputs: Sequence[Tensor]) -> Step:
    """Forward and backward alone; gradients are dropped."""

    def step() -> None:
        model(*inputs).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def take_turns(steps: dict[str, Step], rounds: int, together: bool = True) -> dict[str, list[float]]:
    """Seconds of each, interleaved."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + WARMUP):
        for name, step in steps.items():
            if together and dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            step()
            if together and dist.is_initialized():
                dist.barrier()
            if turn >= WARMUP:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def shown(values: list[float]) -> str:
    return f"{1e3 * statistics.median(values):.1f} ({1e3 * min(values):.1f})"


class Wrapped(nn.Module):
    """A GPT that returns its loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gpt = GPT(size)

    def forward(self, ids: Tensor) -> Tensor:
        return loss_of(self.gpt(ids[:, :-1]), ids)


def growth(rank: int, rounds: int) -> None:
    """8 layers of growing width."""
    _title(rank, "Growth with size, 2 ranks", "| M parameters | stage | step ms | compute ms | MB sent | ns a byte |")
    for width in (724, 1448, 2896, 5000):
        _beyond(rank, rounds, (8, 1, width), per_byte=True)


def tensors(rank: int, rounds: int) -> None:
    """8 M parameters in 10 units and more and more tensors."""
    _title(rank, "Growth with tensors, 2 ranks", "| tensors | stage | step ms | compute ms | us a tensor beyond |")
    for count, width in ((10, 895), (100, 283), (1000, 89)):
        _beyond(rank, rounds, (10, count // 10, width), per_byte=False)


def _beyond(rank: int, rounds: int, shape: tuple[int, int, int], per_byte: bool) -> None:
    units, layers, width = shape
    inputs = (torch.randn(2, width),)
    for stage in (1, 3):
        torch.manual_seed(0)
        ours = engine_step(Layers(*shape), {"stage": stage}, inputs)
        seconds = take_turns({"ours": ours, "compute": compute_step(Layers(*shape), inputs)}, rounds)
        beyond = statistics.median(seconds["ours"]) - statistics.median(seconds["compute"])
        sent = ours.engine.ledger().total_bytes  # type: ignore[attr-defined]
        size = f"{units * layers * width**2 / 1e6:.0f}" if per_byte else str(units * layers)
        cells = [size, str(stage), shown(seconds["ours"]), shown(seconds["compute"])]
        if per_byte:
            cells += [f"{sent / 1e6:.0f}", f"{1e9 * beyond / sent:.2f}"]
        else:
            cells += [f"{1e6 * beyond / (units * layers):.0f}"]
        _row(rank, cells)
        ours.engine.close()  # type: ignore[attr-defined]
        del ours
        gc.collect()


def host(rank: int, rounds: int) -> None:
    """12 layers, 16 wide, one rank: what is left is the host."""
    _title(rank, "Host time, one rank, 12 layers", "| stage | engine ms | forward and backward ms | of a 100 ms step |")
    size = Size(64, 16, 12, 2, 8)
    inputs = (torch.randint(0, 64, (1, 9)),)
    for stage in (0, 1, 2, 3):
        steps = {
            "ours": engine_step(Wrapped(size), {"stage": stage, "gradient_clipping": 1.0}, inputs),
            "compute": compute_step(Wrapped(size), inputs),
        }
        seconds = take_turns(steps, 10 * rounds)
        beyond = min(seconds["ours"]) - min(seconds["compute"])
        _row(rank, [str(stage), shown(seconds["ours"]), shown(seconds["compute"]), f"{beyond / 0.1:.1%} (minima)"])


def checkpointing(rank: int, rounds: int) -> None:
    """27.4 M parameters, 8 sequences, one rank."""
    _title(rank, "Activation checkpointing, one rank", "| policy | step ms | over none | activations MB | of none |")
    inputs = (torch.randint(0, SMALL.vocabulary, (8, SMALL.length + 1)),)
    policies = ("none", "selective", "every:2", "full")
    steps = dict[str, Step]()
    for policy in policies:
        torch.manual_seed(0)
        steps[policy] = engine_step(Wrapped(SMALL), {"stage": 0, "activation_checkpointing": policy}, inputs)
    seconds, most = take_turns(steps, rounds), dict[str, int]()
    for policy, step in steps.items():
        step.engine.watch_memory()  # type: ignore[attr-defined]
        most[policy] = max(row["activations"] for row in step().memory.values())
    for policy in policies:
        slower = statistics.median(seconds[policy]) / statistics.median(seconds["none"])
        cells = [policy, shown(seconds[policy]), f"{slower:.3f}", f"{most[policy] / 1e6:.0f}"]
        _row(rank, [*cells, f"{most[policy] / most['none']:.2f}"])


def offload(rank: int, rounds: int) -> None:
    """27.4 M parameters, 2 ranks."""
    _title(rank, "Offload on a CPU, 2 ranks", "| stage | none ms | cpu ms | ratio |")
    inputs = (torch.randint(0, SMALL.vocabulary, (1, SMALL.length + 1)),)
    for stage in (1, 3):
        steps = dict[str, Step]()
        for home in ("none", "cpu"):
            torch.manual_seed(0)
            steps[home] = engine_step(Wrapped(SMALL), {"stage": stage, "offload": home}, inputs)
        seconds = take_turns(steps, rounds)
        ratio = statistics.median(seconds["cpu"]) / statistics.median(seconds["none"])
        _row(rank, [str(stage), shown(seconds["none"]), shown(seconds["cpu"]), f"{ratio:.3f}"])


TABLES: dict[str, tuple[int, Callable[[int, int], None]]] = {
    "growth": (2, growth),
    "tensors": (2, tensors),
    "host": (1, host),
    "checkpointing": (1, checkpointing),
    "offload": (2, offload),
}


def _title(rank: int, title: str, header: str) -> None:
    if rank == 0:
        print(f"\n## {title}\n\n{header}\n|{'---|' * (header.count('|') - 1)}", flush=True)


def _row(rank: int, cells: Sequence[str]) -> None:
    if rank == 0:
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TABLES))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(f"# What the engine costs\n\n`{Path(__file__).name}`, {given.rounds} rounds, fp32, {machine()}.", flush=True)
    for name in given.only.split(","):
        ranks, table = TABLES[name]
        run_ranks(ranks, table, given.rounds)


if __name__ == "__main__":
    main()
