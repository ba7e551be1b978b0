"""A three-layer MLP for 20 steps under plain DDP and under each ZeRO stage: bytes per rank, beside the formula.

    python examples/mlp_vs_ddp.py [--ranks 2] [--steps 20] [--width 1024] [--layers 3]

Every case starts from the same weights and sees the same data, in one loop inside the same processes.

    alive    counted from outside after each step: the storage of every living tensor, less what lived before the case
    owned    what the engine says it allocated; "plan" is what it said before it started
    paper    model states by arXiv 1910.02054 in fp32: 16, 8 + 8/N, 4 + 12/N and 16/N bytes per parameter
    states   the engine's weights, gradients, sums, masters and moments: what the paper counts, padding included
    windows  two units' worth of buckets and slots at stages 2 and 3: their share falls as --layers rises
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workers.models.initial import mlp_values
from workers.models.mlp import Mlp
from zero_engine import AdamW, Engine, ZeroConfig
from zero_engine.plan import paper_bytes_per_parameter

BATCH, INPUTS, OUTPUTS = 32, 256, 10
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass(frozen=True)
class Row:
    """One case on one rank."""

    case: str
    alive: list[int]  # bytes after each step
    memory: dict[str, int]  # bytes by category; empty for DDP
    plan: int
    paper: float
    loss: float
    digest: str


def batch_of(step: int, index: int) -> tuple[Tensor, Tensor]:
    """The data of a micro-batch: a function of its numbers alone."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    inputs = torch.randn(BATCH, INPUTS, generator=generator)
    return inputs, inputs[:, :OUTPUTS].argmax(1)


def build(hidden: list[int]) -> Mlp:
    model = Mlp(inputs=INPUTS, hidden=hidden, outputs=OUTPUTS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mlp_values(seed=1)(name, parameter)
    return model


def alive_bytes() -> int:
    """Bytes of all distinct storages that Python can reach."""
    with torch._C.DisableTorchFunctionSubclass():  # stage 3's placeholders answer too
        tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
        tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
        storages = [each.untyped_storage() for each in tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def run_ddp(rank: int, hidden: list[int], steps: int) -> Row:
    before = alive_bytes()
    model = DistributedDataParallel(build(hidden), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    alive, loss = list[int](), torch.zeros(())
    for step in range(steps):
        inputs, targets = batch_of(step, rank)
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        alive.append(alive_bytes() - before)
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    parameters = sum(each.numel() for each in model.parameters())
    return Row("DDP", alive, {}, 0, 16 * parameters, float(mean), "")


def run_stage(rank: int, hidden: list[int], steps: int, stage: int) -> Row:
    before = alive_bytes()
    ranks = dist.get_world_size()
    config = ZeroConfig(stage=stage, micro_batches=ranks, chunk=1, gradient_clipping=1.0, transport="group")
    engine = Engine(build(hidden), config, AdamW(**ADAMW))
    alive, loss = list[int](), 0.0
    for step in range(steps):
        for index in engine.micro_batches():
            inputs, targets = batch_of(step, index)
            engine.backward(F.cross_entropy(engine.module(inputs), targets))
        loss = engine.step().loss
        alive.append(alive_bytes() - before)
    plan, memory = engine.plan, engine.memory()
    paper = plan.num_parameters * paper_bytes_per_parameter(stage, ranks, "fp32")
    row = Row(f"stage {stage}", alive, memory, sum(plan.memory[rank].values()), paper, loss, engine.digest())
    engine.close()
    return row


def work(rank: int, port: int, ranks: int, hidden: list[int], steps: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    rows = list[Row]()
    for case in ("warm-up", "DDP", 0, 1, 2, 3):
        if isinstance(case, int):
            rows.append(run_stage(rank, hidden, steps, case))
        else:
            rows.append(run_ddp(rank, hidden, steps if case == "DDP" else 1))
        gc.collect()  # the next case starts from nothing
        dist.barrier()
    everybody: list[list[Row] | None] = [None] * ranks
    dist.all_gather_object(everybody, rows[1:])
    if rank == 0:
        show([each for each in everybody if each is not None])
    dist.destroy_process_group()


NOTE = """alive  all tensors that Python can reach after a step, less those before the case: owned, batch and loss
owned  what the engine says it allocated, beside its plan from before the start; DDP says nothing of the kind
"""
STATES, WINDOWS = ("parameters", "gradients", "sums", "master", "moments"), ("buckets", "slots")


def show(everybody: list[list[Row]]) -> None:
    print(NOTE)
    print(f"MB        rank  {'alive after step 1, 2, last':>28}     owned      plan    states   windows     paper")
    for rows in zip(*everybody, strict=True):
        for rank, row in enumerate(rows):
            alive = (row.alive[0], row.alive[min(1, len(row.alive) - 1)], row.alive[-1])
            parts = (sum(row.memory.get(name, 0) for name in names) for names in (STATES, WINDOWS))
            engine = (sum(row.memory.values()), row.plan, *parts)
            numbers = [*alive, *(engine if row.memory else [None] * 4), row.paper]
            cells = "".join(f"{'' if each is None else f'{each / 1e6:.3f}':>10}" for each in numbers)
            print(f"{row.case:8} {rank:5}{cells}   loss {row.loss:.6f}  {row.digest}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=3)
    asked = parser.parse_args()
    widths = [asked.width] * (asked.layers - 1)
    mp.spawn(work, (free_port(), asked.ranks, widths, asked.steps), nprocs=asked.ranks)
