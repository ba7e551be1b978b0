"""One GPU, one rank: a 1.3 B-parameter GPT in bf16 under stages 0 to 3, a plain PyTorch loop and FSDP2.

    python benchmarks/gpu.py [--tiny] [--seconds 330] [--only CASE,...] > benchmarks/results/gpu.md

Needs torch and this repository, nothing else. `--tiny` runs the whole course in seconds, on a CPU where there is no
GPU, so that only CUDA itself is left to try. A case begins only while time is left; each frees its memory. What the
table shows: tokens/s (median step), model FLOP utilisation of dense bf16 (989 TFLOP/s on an H100 or H200), bytes the
engine owns against its plan, activations against a dry run on fake tensors, and per engine how often a step made the
host wait for the GPU (torch's sync debug mode; the norm is the one place that may).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts: deterministic products need it
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from gpt import GPT, Size, Step, loss_of, num_parameters, plain_step
from torch import Tensor

import zero_engine.strategy
from zero_engine import AdamW, Engine, ZeroConfig
from zero_engine.copies import AtOnce, copies_of

PEAK_FLOPS = 989e12  # dense bf16 of an H100 or H200 (NVIDIA's data sheet)
SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass(frozen=True)
class Work:
    """One optimizer step."""

    size: Size
    batch: int  # sequences of a micro-batch
    micro_batches: int
    steps: int  # measured
    warmup: int

    @property
    def tokens(self) -> int:
        return self.batch * self.micro_batches * self.size.length


FULL = Work(Size(50304, 2048, 24, 16, 2048), batch=8, micro_batches=4, steps=5, warmup=2)
TINY = Work(Size(512, 64, 3, 4, 32), batch=2, micro_batches=2, steps=2, warmup=1)


@dataclass
class Found:
    """What a case measured."""

    seconds: list[float]
    peak_bytes: int = 0  # of the allocator, over the measured steps
    notes: tuple[str, ...] = ()


class Course:
    """The machine, the work and the time left."""

    def __init__(self, tiny: bool, seconds: float) -> None:
        self.work = TINY if tiny else FULL
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.end = time.monotonic() + seconds
        generator = torch.Generator().manual_seed(7)
        shape = (self.work.batch, self.work.size.length + 1)
        batches = [torch.randint(0, self.work.size.vocabulary, shape, generator=generator) for _ in range(8)]
        self.batches = [batch.to(self.device) for batch in batches][: self.work.micro_batches]

    def model(self) -> GPT:
        torch.manual_seed(0)
        with self.device:
            return GPT(self.work.size)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def allocated(self, peak: bool) -> int:
        if self.device.type != "cuda":
            return 0
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()

    def clock(self, step: Step, steps: int | None = None) -> Found:
        """Warm up, then measure whole steps."""
        for _ in range(self.work.warmup):
            step(self.batches)
        self.wait()
        self.reset_peak()
        seconds = list[float]()
        for _ in range(self.work.steps if steps is None else steps):
            start = time.perf_counter()
            step(self.batches)
            self.wait()
            seconds.append(time.perf_counter() - start)
        return Found(seconds, self.allocated(peak=True))


def plain(course: Course, compiled: bool = False) -> Found:
    """fp32 weights, autocast to bf16, fused AdamW: what most scripts do."""
    model = course.model()
    compile_blocks(model, compiled)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)
    autocast = partial(torch.autocast, course.device.type, torch.bfloat16)
    return course.clock(plain_step(model, optimizer, autocast))


def fsdp2(course: Course) -> Found:
    """fully_shard of each block over a mesh of one, bf16 weights and fp32 sums."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        backend = "nccl" if course.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        model: Any = course.model()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: Any = {"mesh": init_device_mesh(course.device.type, (1,)), "mp_policy": policy}
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **SETTINGS)
        return course.clock(plain_step(model, optimizer))
    finally:
        dist.destroy_process_group()


def ours(course: Course, stage: int, compiled: bool = False, **settings: Any) -> Found:
    """The engine at a stage; with what it owns, what activations took, and where the host waited."""
    work = course.work
    model = course.model()
    compile_blocks(model, compiled)
    config = ZeroConfig(stage, work.micro_batches, precision="bf16", gradient_clipping=1.0, **settings)
    engine = Engine(model, config, AdamW(**SETTINGS))
    gc.collect()
    at_rest = course.allocated(peak=False)
    found = course.clock(partial(run_step, engine))
    planned, owned = sum(engine.plan.memory[0].values()), sum(engine.memory().values())
    found.notes = (
        f"engine {owned / 2**30:.2f} GiB, plan {planned / 2**30:.2f}{'' if owned == planned else ' DIFFERS'}",
        *activations(course, engine, found.peak_bytes - at_rest),
        *waits(course, engine),
        host_times(engine, course),
    )
    engine.close()
    return found


def run_step(engine: Engine, batches: list[Tensor]) -> float:
    for ids, _ in zip(itertools.cycle(batches), engine.micro_batches(), strict=False):
        engine.backward(loss_of(engine.module(ids[:, :-1]), ids))
    return engine.step().loss


def compile_blocks(model: GPT, compiled: bool) -> None:
    """Each block's forward alone: hooks stand around the call."""
    for block in model.blocks if compiled else ():
        block.forward = torch.compile(block.forward)  # type: ignore[method-assign]


def activations(course: Course, engine: Engine, measured: int) -> tuple[str, ...]:
    """The step's peak over rest, against a dry run on fake tensors."""
    from zero_engine.dry_run import Empty, dry_run

    shape = (course.work.batch, course.work.size.length + 1)
    with torch.device("meta"):
        hollow = GPT(course.work.size)
    run = dry_run(
        hollow, lambda model, ids: loss_of(model(ids[:, :-1]), ids), [Empty(shape, torch.int64)], engine.config
    )
    ratio = f" ({measured / run.peak_bytes:.3f} of it)" if measured else ""
    return (f"activations {measured / 2**30:.2f} GiB, dry run {run.peak_bytes / 2**30:.2f}{ratio}",)


def waits(course: Course, engine: Engine) -> tuple[str, ...]:
    """Where one step made the host wait for the GPU: in backward, and in all."""
    if course.device.type != "cuda":
        run_step(engine, course.batches)
        return ("host waits: no GPU",)
    with counted_waits() as before_step:
        for ids, _ in zip(itertools.cycle(course.batches), engine.micro_batches(), strict=False):
            engine.backward(loss_of(engine.module(ids[:, :-1]), ids))
    with counted_waits() as in_step:
        engine.step()
    places = ", ".join(sorted(set(before_step + in_step)))
    return (f"host waits: {len(before_step)} before the step, {len(in_step)} in it ({places})",)


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """file:line of every wait that torch notices, in this repository where one of its frames is on the stack."""
    places = list[str]()

    def note(message: Any, category: Any, *_: Any, **__: Any) -> None:
        if "synchron" in str(message):
            frames = [frame for frame in traceback.extract_stack() if "zero_engine" in frame.filename]
            places.append(f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "elsewhere")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")


def host_times(engine: Engine, course: Course) -> str:
    """How long the host is busy until it has started a step's last kernel before the norm, and with the update."""
    course.wait()
    start = time.perf_counter()
    for ids, _ in zip(itertools.cycle(course.batches), engine.micro_batches(), strict=False):
        engine.backward(loss_of(engine.module(ids[:, :-1]), ids))
    seconds = time.perf_counter() - start
    update = engine.step().seconds["update"]
    return f"host {1e3 * seconds:.0f} ms, update {1e3 * update:.0f} ms"


def deterministic(course: Course) -> Found:
    """One digest over stages 0 to 3 with deterministic kernels, and what they cost at stage 0."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    digests, seconds = dict[int, str](), list[float]()
    try:
        for stage in (0, 1, 2, 3):
            config = ZeroConfig(stage, course.work.micro_batches, precision="bf16", gradient_clipping=1.0)
            engine = Engine(course.model(), config, AdamW(**SETTINGS))
            if stage == 0:
                seconds = course.clock(partial(run_step, engine), steps=2).seconds
            else:
                for _ in range(course.work.warmup + 2):
                    run_step(engine, course.batches)
            digests[stage] = engine.digest()
            engine.close()
            del engine
            free(course)
    finally:
        torch.use_deterministic_algorithms(False)
    same = "one digest" if len(set(digests.values())) == 1 else "DIGESTS DIFFER"
    return Found(seconds, notes=(f"{same}: {digests}",))


def offload(course: Course, in_turn: bool = False) -> Found:
    """Masters, moments and the update in pinned host memory; fewer steps, because the update takes most of them.

    `in_turn`: the host waits for each copy, as it would without streams of their own: what the overlap is worth.
    """
    short = replace(course.work, steps=2, warmup=1)
    course.work, before = short, course.work
    make = (lambda device: AtOnce()) if in_turn else copies_of
    try:
        with patch.object(zero_engine.strategy, "copies_of", make):
            return ours(course, 0, offload="cpu")
    finally:
        course.work = before


CASES: dict[str, Callable[[Course], Found]] = {
    "plain": plain,
    "fsdp2": fsdp2,
    **{f"stage {stage}": partial(ours, stage=stage) for stage in (0, 1, 2, 3)},
    "deterministic": deterministic,
    "plain compiled": partial(plain, compiled=True),
    "stage 0 compiled": partial(ours, stage=0, compiled=True),
    "offload": offload,
    "offload in turn": partial(offload, in_turn=True),
}


def free(course: Course) -> None:
    gc.collect()
    if course.device.type == "cuda":
        torch.cuda.empty_cache()


def row(name: str, found: Found, course: Course, best: float) -> str:
    if not found.seconds:
        return f"| {name} | - | - | - | - | - | {'; '.join(found.notes)} |"
    median = statistics.median(found.seconds)
    speed = course.work.tokens / median
    share = speed * course.work.size.flops_per_token / PEAK_FLOPS
    cells = [f"{1e3 * median:.1f}", f"{speed:.0f}", f"{speed / best:.3f}", f"{share:.1%}"]
    return f"| {name} | {' | '.join(cells)} | {found.peak_bytes / 2**30:.2f} | {'; '.join(found.notes)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=330.0, help="no case begins later")
    parser.add_argument("--only", default="", help="some of: " + ", ".join(CASES))
    given = parser.parse_args()
    if not (given.tiny or torch.cuda.is_available()):
        print("no GPU here; --tiny tries the course on a CPU")
        return
    course, found = Course(given.tiny, given.seconds), dict[str, Found]()
    for name in given.only.split(",") if given.only else CASES:
        if time.monotonic() > course.end:
            found[name] = Found([], notes=("no time left",))
            continue
        start = time.monotonic()
        try:
            found[name] = CASES[name](course)
        except Exception as error:  # the other cases still count
            traceback.print_exc()
            found[name] = Found([], notes=(f"{type(error).__name__}: {str(error).splitlines()[0]}",))
        free(course)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    print(report(course, found))


def report(course: Course, found: dict[str, Found]) -> str:
    work, size = course.work, course.work.size
    device = torch.cuda.get_device_name() if course.device.type == "cuda" else "CPU (only that the course runs)"
    peers = [each for name, each in found.items() if name in ("plain", "fsdp2") and each.seconds]
    best = max((work.tokens / statistics.median(each.seconds) for each in peers), default=1.0)
    lines = [
        "# One GPU",
        "",
        f"`python benchmarks/gpu.py` on {device}, torch {torch.__version__}: {num_parameters(size) / 1e6:.1f} M "
        f"parameters, {work.micro_batches} micro-batches of {work.batch} x {size.length} tokens, {work.steps} steps. "
        "Ratio: tokens/s over the better of plain and FSDP2.",
        "",
        "| case | step ms | tokens/s | ratio | MFU | peak GiB | |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(row(name, each, course, best) for name, each in found.items())])


if __name__ == "__main__":
    main()
