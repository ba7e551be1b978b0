"""Seconds to save and to load one training state: ours beside raw files, torch.save, safetensors and torch's DCP.

    python benchmarks/checkpoint.py [--parameters 100] [--ranks 2] [--rounds 5] [--stage 3] [--folder DIR] [--out FILE]
                                    [--only saves loads background]

A state is `--parameters` million fp32 weights with both AdamW moments. All cases take turns in one process group of
gloo ranks with one thread each, and a time is that of the slowest rank, from a barrier on. Every write ends with fsync.
Before a cold read the files are read once and dropped from the page cache, before a warm one they are read once.
`growth` is the peak resident memory of the largest rank over the memory before the case. Ratios are medians over
medians of the raw case.

Note: why files are read before they are dropped. A virtual machine gives free memory back to its host, and the first
touch afterwards costs more than the reading itself. Files that were written past the page cache would pay for it in
the next reading, those written through it would not; so each case finds the pages of its own files just freed.

The engine is at stage 3, where a load ends with the rank's own bytes; at stages 0 to 2 it ends by sending every rank
all weights, which no peer's case does ("ours, stage 2" shows it). `processor` is the time that the process of the
slowest rank was given: it hardly depends on who else uses the machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from zero_engine import AdamW, Engine, ZeroConfig
from zero_engine.saver import SaveReport
from zero_engine.shard import block_checksums
from zero_engine.state import block_bytes, bytes_of

CHUNK_BYTES = 16 * 2**20
WIDTH = 1024  # a block of two square-ish linears: 8.4 M parameters
PARTS = ("saves", "loads", "background")
TOKENS = 256  # rows of a micro-batch in the training part


@dataclass
class Case:
    """Measurements of one way to save or load."""

    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    growth_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Asked:
    """The command line."""

    parameters: float
    ranks: int
    rounds: int
    steps: int
    stage: int
    only: list[str]
    folder: str
    out: str


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
        found = torch.tensor([seconds, processor, float(resident("VmHWM") - before)], dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        case = self.cases.setdefault(name, Case())
        case.seconds.append(float(found[0]))
        case.processor_seconds.append(float(found[1]))
        case.growth_bytes.append(int(found[2]))

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
        dcp.save(self._named(self.own), checkpoint_id=self.folder / "dcp")

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
        dcp.load(self._named(self.buffers), checkpoint_id=self.folder / "dcp")

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

    def _named(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
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

    # Training with saves in the background

    def step(self) -> float:
        begun = time.perf_counter()
        for index in self.engine.micro_batches():
            torch.manual_seed(index)
            self.engine.backward(self.engine.module(torch.randn(TOKENS, WIDTH)).square().mean())
        self.engine.step()
        return time.perf_counter() - begun

    def train(self, steps: int, save: Callable[[], Callable[[], object]] | None) -> tuple[float, float]:
        """Seconds of `steps` steps with a save at the first, waited for at the end; seconds that `save` blocked."""
        dist.barrier()
        begun, blocked = time.perf_counter(), 0.0
        finish: Callable[[], object] = lambda: None  # noqa: E731
        if save is not None:
            finish = save()
            blocked = time.perf_counter() - begun
        for _ in range(steps):
            self.step()
        finish()
        return time.perf_counter() - begun, blocked


def measure_saves(bench: Bench, rounds: int) -> None:
    """Every way to save, in turns."""
    ways = {
        "raw": bench.raw_write,
        "torch": bench.torch_save,
        "safetensors": bench.safetensors_save,
        "dcp": bench.dcp_save,
        "ours": bench.our_save,
    }
    for number in range(rounds + 1):
        for name, work in ways.items():
            bench.clear(name)
            bench.time(f"save {name}", work)
        if number == 0:
            bench.cases.clear()  # the first round warms up


def measure_loads(bench: Bench, rounds: int) -> None:
    """Every way to load, cold and warm, in turns."""
    ways = {
        "raw": ("raw", bench.raw_read),
        "torch": ("torch", bench.torch_load),
        "safetensors": ("safetensors", bench.safetensors_load),
        "dcp": ("dcp", bench.dcp_load),
        "ours": ("ours", bench.our_load),
        "ours, resharded": ("other", bench.our_reshard),
        "ours, stage 2": ("ours", bench.our_load_at_stage_2),
    }
    _ = bench.gathering  # built before anything is measured
    for _ in range(rounds):
        for name, (files, work) in ways.items():
            bench.pass_over(files, drop)
            bench.time(f"load {name}, cold", work)
            bench.pass_over(files, read_through)
            bench.time(f"load {name}, warm", work)


def measure_background(bench: Bench, rounds: int, steps: int) -> dict[str, list[float]]:
    """Whole cost to training of a save in the background, and how long the training thread stood still."""
    found: dict[str, list[float]] = {}
    saver = bench.engine.saver(bench.folder / "background", fence=1)
    group = dist.new_group(backend="gloo")
    number, blocked = 0, list[float]()

    def ours() -> Callable[[], object]:
        nonlocal number
        number += 1
        saver.save(number)
        return lambda: blocked.append(require(saver.finish()).blocked_seconds)

    def theirs() -> Callable[[], object]:
        future: Any = dcp.async_save(
            bench._named(bench.own), checkpoint_id=bench.folder / "background-dcp", process_group=group
        )
        return future.result

    def dcp_sync() -> Callable[[], object]:
        dcp.save(bench._named(bench.own), checkpoint_id=bench.folder / "background-dcp", process_group=group)
        return lambda: None

    ways: dict[str, Callable[[], Callable[[], object]] | None] = {
        "nothing": None, "ours": ours, "dcp async": theirs, "dcp": dcp_sync,
    }  # fmt: skip
    bench.train(1, None)
    for _ in range(rounds):
        for name, save in ways.items():
            bench.clear("background-dcp")
            seconds, call = bench.train(steps, save)
            pair = torch.tensor([seconds, call], dtype=torch.float64)
            dist.all_reduce(pair, op=dist.ReduceOp.MAX)
            found.setdefault(f"{name}: {steps} steps", []).append(float(pair[0]))
            found.setdefault(f"{name}: save call", []).append(float(pair[1]))
    found["ours: training stood still"] = blocked  # in the call, and before an update until the copies were done
    begun, given = time.perf_counter(), time.process_time() + given_to(saver._writer.pid)
    number += 1
    saver.save(number)
    saver.hold()
    report = require(saver.finish())
    found["ours: save alone"] = [time.perf_counter() - begun]
    found["ours: processor of a rank and its writer"] = [time.process_time() + given_to(saver._writer.pid) - given]
    found["ours: copy of a shard"] = [report.copy_seconds]
    found["ours: write of a shard"] = [report.write_seconds]
    found["ours: digest and checksums"] = [measure_checks(bench)]
    return found


def measure_checks(bench: Bench) -> float:
    """Processor seconds of what a save computes over a shard: finite values, digest, a checksum per block."""
    subject, begun = bench.engine._subject, time.process_time()
    state = list(subject.owned())
    subject.digest_part(state, subject.scalars())
    for _, tensor in state:
        block_checksums(bytes_of(tensor), block_bytes(subject.layout, tensor))
    return time.process_time() - begun


def given_to(process: int) -> float:
    """Processor seconds of another process, in hundredths."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


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


def require(reports: list[SaveReport]) -> SaveReport:
    """The one report of a save that went well."""
    (report,) = reports
    assert not report.problem, report.problem
    return report


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


def begin(rank: int, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)


def write_other(rank: int, ranks: int, port: int, asked: Asked) -> None:
    """A checkpoint by another number of ranks, for resharding."""
    begin(rank, ranks, port)
    bench = Bench(rank, ranks, Path(asked.folder), asked.parameters, stage=asked.stage)
    bench.engine.save(bench.folder / "other", step=1, fence=1)
    dist.barrier()


def run_rank(rank: int, ranks: int, port: int, asked: Asked) -> None:
    """All measurements of one rank; rank 0 writes them down."""
    begin(rank, ranks, port)
    bench = Bench(rank, ranks, Path(asked.folder), asked.parameters, asked.stage)
    if {"saves", "loads"} & set(asked.only):
        measure_saves(bench, asked.rounds)
    if "loads" in asked.only:
        measure_loads(bench, asked.rounds)
    background = measure_background(bench, asked.rounds, asked.steps) if "background" in asked.only else {}
    state_bytes = sum(tensor.numel() * 4 for tensor in bench.own.values())
    if rank == 0:
        found = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
            f"load average {os.getloadavg()[0]:.0f}",
            "asked": asdict(asked),
            "shard_bytes": state_bytes,
            "cases": {name: asdict(case) for name, case in bench.cases.items()},
            "background": background,
        }
        Path(asked.folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    bench.engine.close()


def launch(work: Callable[..., None], ranks: int, asked: Asked) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(work, (ranks, port, asked), nprocs=ranks)


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    asked, lines = found["asked"], list[str]()
    lines.append(f"{asked['parameters']} M parameters with AdamW moments, {asked['ranks']} ranks, ")
    lines.append(f"{found['shard_bytes'] / 1e6:.0f} MB a rank, {asked['rounds']} rounds. {found['machine']}.\n")
    lines += ["| case | seconds, median | minimum | over raw | processor | over raw | growth, MB |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, case in found["cases"].items():
        median, least = statistics.median(case["seconds"]), min(case["seconds"])
        action, _, rest = name.partition(" ")
        raw = found["cases"][
            f"{action} raw{rest[rest.index(', c' if 'cold' in rest else ', w') :] if ',' in rest else ''}"
        ]
        ratio = median / statistics.median(raw["seconds"])
        given, given_raw = (statistics.median(each["processor_seconds"]) for each in (case, raw))
        growth = statistics.median(case["growth_bytes"]) / 1e6
        words = f"{median:.3f} | {least:.3f} | {ratio:.2f} | {given:.3f} | {given / given_raw:.2f} | {growth:.0f}"
        lines.append(f"| {name} | {words} |")
    lines += ["", "| in the background | seconds, median | minimum |", "|---|---|---|"]
    for name, seconds in found["background"].items():
        lines.append(f"| {name} | {statistics.median(seconds):.3f} | {min(seconds):.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=100, help="millions")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="training steps beside a background save")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="of the engine that saves and loads")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, help="loads need the saves")
    parser.add_argument("--folder", default="", help="where to write; default: a temporary folder")
    parser.add_argument("--out", default="", help="Markdown file for the tables; raw numbers beside it as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder or None, prefix="checkpoint-benchmark-") as folder:
        asked = Asked(
            given.parameters, given.ranks, given.rounds, given.steps, given.stage, given.only, folder, given.out
        )
        if "loads" in asked.only:
            launch(write_other, 2 * asked.ranks, asked)
        launch(run_rank, asked.ranks, asked)
        found = json.loads(Path(folder, "found.json").read_text())
    found["asked"].pop("folder")
    print(table(found))
    if asked.out:
        Path(asked.out).write_text(table(found))
        Path(asked.out).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
