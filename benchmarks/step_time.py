"""Seconds per optimizer step of the same GPT under our engine and its peers, interleaved step by step.

    python benchmarks/step_time.py [--ranks 2] [--micro-batches 1] [--engines ddp,ours0,ours1,...] [--rounds 15]

Engines: ddp | zro (ZeroRedundancyOptimizer) | fsdp2 | fsdp2-keep (no reshard) | ours0..ours3 | compute (forward and
backward alone). `ours1:group` forces point-to-point messages over gloo; the default is shared memory. All engines live
in one process group of gloo ranks with one thread each and take turns, so that they see the same machine. Ratios are
medians over medians of DDP, minima beside them, and the least processor time of rank 0. With several micro-batches per
rank DDP uses no_sync, and FSDP2 reduces every micro-batch. With one engine alone its peak memory is printed too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import resource
import socket
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from zero_engine import AdamW, Engine, ZeroConfig

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 8192, 512, 6, 8, 128  # 27.4 M parameters
SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
WARMUP = 3


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class GPT(nn.Module):
    """Untied head, learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


Step = Callable[[list[Tensor]], float]  # a rank's micro-batches -> loss of the last


def ours(stage: int, transport: str, micro_batches: int) -> Step:
    ranks = dist.get_world_size()
    config = ZeroConfig(stage, ranks * micro_batches, micro_batches, gradient_clipping=1.0, transport=transport)
    engine = Engine(GPT(), config, AdamW(**SETTINGS))

    def step(batches: list[Tensor]) -> float:
        for place, _ in enumerate(engine.micro_batches()):
            ids = batches[place % len(batches)]
            engine.backward(loss_of(engine.module(ids[:, :-1]), ids))
        return engine.step().loss

    return step


def ddp(zero: bool) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(GPT(), gradient_as_bucket_view=True)
    optimizer: Any
    if zero:
        options = {"optimizer_class": torch.optim.AdamW, "parameters_as_bucket_view": True, **SETTINGS}
        optimizer = ZeroRedundancyOptimizer(model.parameters(), **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)

    def step(batches: list[Tensor]) -> float:
        for ids in batches[:-1]:
            with model.no_sync():
                (loss_of(model(ids[:, :-1]), ids) / len(batches)).backward()
        loss = loss_of(model(batches[-1][:, :-1]), batches[-1]) / len(batches)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def fsdp2(reshard: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = GPT()
    options: Any = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), "reshard_after_forward": reshard}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)

    def step(batches: list[Tensor]) -> float:
        for ids in batches:
            loss = loss_of(model(ids[:, :-1]), ids) / len(batches)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def compute() -> Step:
    model = GPT()

    def step(batches: list[Tensor]) -> float:
        for ids in batches:
            loss = loss_of(model(ids[:, :-1]), ids) / len(batches)
            loss.backward()
        model.zero_grad()
        return loss.item()

    return step


def step_of(name: str, micro_batches: int) -> Step:
    """An engine by its name on the command line."""
    torch.manual_seed(0)
    if name.startswith("ours"):
        stage, _, transport = name[4:].partition(":")
        return ours(int(stage), transport or "auto", micro_batches)
    return {
        "ddp": lambda: ddp(zero=False),
        "zro": lambda: ddp(zero=True),
        "fsdp2": lambda: fsdp2(reshard=True),
        "fsdp2-keep": lambda: fsdp2(reshard=False),
        "compute": compute,
    }[name]()


@dataclass(frozen=True)
class Arguments:
    engines: tuple[str, ...]
    ranks: int
    micro_batches: int
    rounds: int
    profile: str


def rank_main(rank: int, arguments: Arguments, port: int) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, arguments.ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    generator = torch.Generator().manual_seed(100 + rank)
    batches = [
        torch.randint(0, VOCABULARY, (1, LENGTH + 1), generator=generator) for _ in range(arguments.micro_batches)
    ]
    before = peak_bytes()
    steps = {name: step_of(name, arguments.micro_batches) for name in arguments.engines}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    busy: dict[str, list[float]] = {name: [] for name in steps}
    for round in range(arguments.rounds + WARMUP):
        for name, step in steps.items():
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            with profiled(arguments.profile == name and rank == 0 and round == arguments.rounds + WARMUP - 1):
                step(batches)
            used = time.process_time() - used
            dist.barrier()
            if round >= WARMUP:
                busy[name].append(used)
                seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        report(seconds, busy, arguments)
        if len(steps) == 1:
            parameters = sum(parameter.numel() for parameter in GPT().parameters())
            print(f"peak over start: {(peak_bytes() - before) / parameters:.1f} bytes per parameter")
    dist.barrier()
    os._exit(0)


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def profiled(on: bool) -> Any:
    """Print where one step's time goes."""
    if not on:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25), flush=True)


def report(seconds: dict[str, list[float]], busy: dict[str, list[float]], arguments: Arguments) -> None:
    first = "ddp" if "ddp" in seconds else next(iter(seconds))
    base, work = seconds[first], min(busy[first])
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    print(
        f"{arguments.ranks} ranks, {arguments.micro_batches} micro-batches per rank, "
        f"{arguments.rounds} rounds, {machine}"
    )
    print(f"{'engine':<14}{'median ms':>10}{'min ms':>9}{'ratio':>8}{'min ratio':>11}{'cpu ms':>9}{'cpu ratio':>11}")
    for name, values in seconds.items():
        median, least = statistics.median(values), min(values)
        ratios = (median / statistics.median(base), least / min(base))
        line = f"{name:<14}{1e3 * median:>10.1f}{1e3 * least:>9.1f}{ratios[0]:>8.3f}{ratios[1]:>11.3f}"
        print(f"{line}{1e3 * min(busy[name]):>9.1f}{min(busy[name]) / work:>11.3f}")
    print(
        json.dumps({name: [round(1e3 * value, 1) for value in values] for name, values in seconds.items()}), flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="ddp,ours0,ours1,ours2,ours3")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", default="", help="engine whose last step is profiled on rank 0")
    given = parser.parse_args()
    arguments = Arguments(
        tuple(given.engines.split(",")), given.ranks, given.micro_batches, given.rounds, given.profile
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    ranks = [context.Process(target=rank_main, args=(rank, arguments, port)) for rank in range(arguments.ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"a rank failed: {[process.exitcode for process in ranks]}")


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
