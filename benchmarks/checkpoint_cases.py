"""One rank of `checkpoint.py`: a training state, and every way to save and to load it."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from zero_engine import AdamW, Engine, ZeroConfig
from zero_engine.state import bytes_of

CHUNK_BYTES = 16 * 2**20
WIDTH = 1024  # a block of two square-ish linears: 8.4 M parameters
TOKENS = 256  # rows of a micro-batch in the training part


@dataclass
class Case:
    """Measurements of one way to save or load."""

    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    growth_bytes: list[int] = field(default_factory=list)


class Bench:
    """One rank."""

    def __init__(self, rank: int, ranks: int, folder: Path, parameters: float, stage: int) -> None:
        self.rank, self.ranks, self.folder, self.parameters = rank, ranks, folder, parameters
        self.engine = Engine(model_of(parameters), ZeroConfig(stage=stage, micro_batches=ranks), AdamW())
        pieces = [self.engine.master.tensors(p.run, p.range) for p in self.engine.master.pieces]
        self.own = {f"{i}.{kind}": tensor for i, piece in enumerate(pieces) for kind, tensor in piece.items()}
        for name, tensor in self.own.items():
            tensor.normal_(std=0.02)
            if name.endswith("exp_avg_sq"):
                tensor.abs_()
        self.buffers = {name: torch.zeros_like(tensor) for name, tensor in self.own.items()}
        self.cases: dict[str, Case] = {}

    def time(self, name: str, work: Callable[[], object]) -> None:
        """One measurement of a case: the slowest rank's time and the largest growth."""
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        dist.barrier()
        begun, given = time.perf_counter(), time.process_time()
        work()
        seconds, processor = time.perf_counter() - begun, time.process_time() - given
        seconds, processor, growth = self.slowest(seconds, processor, float(resident("VmHWM") - before))
        case = self.cases.setdefault(name, Case())
        case.seconds.append(seconds)
        case.processor_seconds.append(processor)
        case.growth_bytes.append(int(growth))

    def slowest(self, *measured: float) -> list[float]:
        """Of each number the largest of any rank."""
        found = torch.tensor(measured, dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [float(each) for each in found]

    def path(self, name: str) -> Path:
        return self.folder / f"{name}-{self.rank}"

    # Saving

    def raw_write(self) -> None:
        descriptor = os.open(self.path("raw"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for tensor in self.own.values():
            data, done = bytes_of(tensor), 0
            while done < len(data):
                done += os.write(descriptor, data[done : done + CHUNK_BYTES])
        os.fsync(descriptor)
        os.close(descriptor)

    def torch_save(self) -> None:
        with open(self.path("torch"), "wb") as file:
            torch.save(self.own, file)
            file.flush()
            os.fsync(file.fileno())

    def safetensors_save(self) -> None:
        save_file({name: tensor.contiguous() for name, tensor in self.own.items()}, self.path("safetensors"))
        sync(self.path("safetensors"))

    def dcp_save(self) -> None:
        dcp.save(self.named(self.own), checkpoint_id=self.folder / "dcp")

    def our_save(self) -> None:
        self.engine.save(self.folder / "ours", step=1, fence=1)

    # Loading

    def raw_read(self) -> None:
        descriptor = os.open(self.path("raw"), os.O_RDONLY)
        place = 0
        for tensor in self.buffers.values():
            data, done = bytes_of(tensor), 0
            while done < len(data):
                done += os.preadv(descriptor, [data[done : done + CHUNK_BYTES]], place + done)
            place += len(data)
        os.close(descriptor)

    def torch_load(self) -> None:
        torch.load(self.path("torch"))

    def safetensors_load(self) -> None:
        for name, tensor in load_file(self.path("safetensors")).items():
            self.buffers[name].copy_(tensor)  # the file is mapped, not read, until then

    def dcp_load(self) -> None:
        dcp.load(self.named(self.buffers), checkpoint_id=self.folder / "dcp")

    def our_load(self) -> None:
        self.engine.restore(self.folder / "ours")

    def our_reshard(self) -> None:
        self.engine.restore(self.folder / "other")

    def our_load_at_stage_2(self) -> None:
        self.gathering.restore(self.folder / "ours")

    @cached_property
    def gathering(self) -> Engine:
        """The same model at stage 2."""
        config = ZeroConfig(stage=2, micro_batches=self.ranks)
        return Engine(model_of(self.parameters), config, AdamW())

    def named(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        return {f"{self.rank}.{name}": tensor for name, tensor in tensors.items()}

    def pass_over(self, name: str, work: Callable[[Path], None]) -> None:
        """Do something with every file of a case, the ranks in turns."""
        dist.barrier()
        for path in sorted([*self.folder.glob(f"{name}-*"), *(self.folder / name).rglob("*")])[self.rank :: self.ranks]:
            if path.is_file():
                work(path)
        dist.barrier()

    def clear(self, *names: str) -> None:
        """Remove what a case wrote."""
        dist.barrier()
        if self.rank == 0:
            for name in names:
                for path in [*self.folder.glob(f"{name}-*"), self.folder / name]:
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        dist.barrier()

    # Training

    def step(self) -> None:
        for index in self.engine.micro_batches():
            torch.manual_seed(index)
            self.engine.backward(self.engine.module(torch.randn(TOKENS, WIDTH)).square().mean())
        self.engine.step()


def model_of(parameters: float) -> nn.Module:
    """Residual blocks of two linears, about so many million parameters."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.down(torch.relu(self.up(x)))
            return y

    return nn.Sequential(*(Block() for _ in range(max(1, round(parameters * 1e6 / (8 * WIDTH * WIDTH))))))


def resident(key: str) -> int:
    """Bytes of VmRSS or VmHWM of this process."""
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0])


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def read_through(path: Path) -> None:
    """Have a file in the page cache."""
    descriptor, buffer = os.open(path, os.O_RDONLY), bytearray(CHUNK_BYTES)
    while os.readv(descriptor, [buffer]):
        continue
    os.close(descriptor)


def drop(path: Path) -> None:
    """Read a file, write it back and drop it from the page cache."""
    read_through(path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
