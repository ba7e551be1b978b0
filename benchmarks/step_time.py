"""Seconds per optimizer step of the same GPT under our engine and its peers, interleaved step by step.

    python benchmarks/step_time.py [--ranks 2] [--micro-batches 1] [--engines ddp,ours0,ours1,...] [--rounds 15]

Engines: ddp | zro (ZeroRedundancyOptimizer) | fsdp2 | fsdp2-keep (no reshard) | ours0..ours3 | compute (forward and
backward alone) | ds1..ds3 (DeepSpeed). `ours1:group` forces point-to-point messages over gloo, `ours1:group:naive`
gives every rank all sums first; the default is shared memory. All engines live in one process group of gloo ranks with
one thread each and take turns, so that they see the same machine. Ratios are medians over medians of DDP, minima beside
them, and the least processor time of rank 0. With several micro-batches per rank DDP uses no_sync, and FSDP2 reduces
every micro-batch. With one engine alone its peak memory is printed too.

DeepSpeed is measured by the same script in an interpreter of its own, in a process group of its own with DDP beside it:

    python -m venv peers && DS_BUILD_OPS=0 peers/bin/pip install torch==2.13.0 deepspeed==0.19.8 setuptools numpy
    python benchmarks/step_time.py --deepspeed-python peers/bin/python [--ranks 2]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, SMALL, Step, loss_of, num_parameters, plain_step
from ranks import machine, run_ranks
from torch import Tensor, nn

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
WARMUP = 3


def ours(stage: int, transport: str, reducer: str, micro_batches: int) -> Step:
    from zero_engine import AdamW, Engine, ZeroConfig

    ranks = dist.get_world_size()
    options: dict[str, Any] = {"transport": transport, **({"reducer": reducer} if reducer else {})}
    config = ZeroConfig(stage, ranks * micro_batches, micro_batches, gradient_clipping=1.0, **options)
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
    return plain_step(model, optimizer)


def deepspeed(stage: int, micro_batches: int) -> Step:
    import deepspeed

    model = GPT()
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)

    def step(batches: list[Tensor]) -> float:
        for ids in batches:
            loss = loss_of(wrapped(ids[:, :-1]), ids)
            wrapped.backward(loss)
            wrapped.step()
        return float(loss)

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
        stage, transport, reducer, *_ = [*name[4:].split(":"), "", ""]
        return ours(int(stage), transport or "auto", reducer, micro_batches)
    if name.startswith("ds"):
        return deepspeed(int(name[2:]), micro_batches)
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


def rank_main(rank: int, arguments: Arguments) -> None:
    generator = torch.Generator().manual_seed(100 + rank)
    batches = [
        torch.randint(0, SMALL.vocabulary, (1, SMALL.length + 1), generator=generator)
        for _ in range(arguments.micro_batches)
    ]
    if any(name.startswith("ds") for name in arguments.engines):
        import deepspeed  # noqa: F401  its import is not part of the peak
    if any(name.startswith("ours") for name in arguments.engines):
        import zero_engine.engine  # noqa: F401  nor is ours
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
            print(f"peak over start: {(peak_bytes() - before) / num_parameters(SMALL):.1f} bytes per parameter")


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
    print(
        f"{arguments.ranks} ranks, {arguments.micro_batches} micro-batches per rank, "
        f"{arguments.rounds} rounds, {machine()}"
    )
    print(f"{'engine':<18}{'median ms':>10}{'min ms':>9}{'ratio':>8}{'min ratio':>11}{'cpu ms':>9}{'cpu ratio':>11}")
    for name, values in seconds.items():
        median, least = statistics.median(values), min(values)
        ratios = (median / statistics.median(base), least / min(base))
        line = f"{name:<18}{1e3 * median:>10.1f}{1e3 * least:>9.1f}{ratios[0]:>8.3f}{ratios[1]:>11.3f}"
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
    parser.add_argument("--deepspeed-python", type=Path, help="measure ddp,ds1,ds2,ds3 with this interpreter instead")
    given = parser.parse_args()
    if given.deepspeed_python:
        options = ["--ranks", str(given.ranks), "--micro-batches", str(given.micro_batches)]
        options += ["--engines", "ddp,ds1,ds2,ds3", "--rounds", str(given.rounds)]
        raise SystemExit(subprocess.call([given.deepspeed_python, __file__, *options]))
    arguments = Arguments(
        tuple(given.engines.split(",")), given.ranks, given.micro_batches, given.rounds, given.profile
    )
    run_ranks(arguments.ranks, rank_main, arguments)


if __name__ == "__main__":
    main()
