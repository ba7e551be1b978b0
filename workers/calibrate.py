"""`python -m workers.calibrate`: what this machine reaches, in about ten seconds; written to the data folder.

For one rank, or one GPU: products (fp32; bf16 on CUDA) and attention in the shapes of a transformer's layers, what else
such a layer does (norm, activation function, sums, loss, both ways), an element-wise pass over memory that no cache
holds, the sums of squares of the norm, and payload from one process to another, through the memory that ranks of a node
share (on a CPU) or between two GPUs. Each is the median of rounds, so that a busy moment does not decide.

Note: why all cores are busy on a CPU. Ranks run side by side and share caches, memory and the clock of the processor:
one rank alone is some 5 % faster than each of two. So a process for every other core measures the same meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from mmap import mmap
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.calibrations import Machine, calibration_file, machine_of, this_machine
from workers.step_time import ACTIVATION_PASSES, Calibration, Device
from zero_engine.blueprint import STRIDE
from zero_engine.clip import block_sums

SECONDS = 1.5  # for each rate
PRODUCT = {"cpu": (512, 512, 2048), "cuda": (8192, 8192, 8192)}  # tokens, width, and what a layer widens it to
LENGTH, HEAD = 128, 64  # of a sequence and of a head
BLOCK = 1024  # elements
PASS_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}


def calibrate(device: Device, threads: int = 1, seconds: float = SECONDS) -> Calibration:
    """Measure; leaves torch with so many threads."""
    here = this_machine(device, threads)
    with _busy_beside(here.cores // threads - 1 if device == "cpu" else 0, device, threads, seconds):
        return _measured(here, device, threads, seconds)


@contextmanager
def _busy_beside(others: int, device: Device, threads: int, seconds: float) -> Iterator[None]:
    """So many processes that measure too, for nobody, while the block runs. torch must not have computed before."""
    children, parent = list[int](), os.getpid()
    for _ in range(others):
        child = os.fork()
        if child == 0:
            try:
                while os.getppid() == parent:
                    _measured(this_machine(device, threads), device, threads, seconds)
            finally:
                os._exit(0)
        children.append(child)
    try:
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _measured(here: Machine, device: Device, threads: int, seconds: float) -> Calibration:
    torch.set_num_threads(threads)
    return Calibration(
        device=device,
        hardware=here.hardware or torch.cuda.get_device_name(0),
        torch=here.torch,
        cores=here.cores,
        threads=here.threads,
        matmul_flops=_matmul_rate(device, seconds),
        attention_flops=_attention_rate(device, seconds),
        activation_bytes=_activation_rate(device, seconds),
        memory_bytes=_memory_rate(device, seconds),
        norm_elements=_norm_rate(device, seconds),
        exchange_bytes=_exchange_rate(device, seconds),
        day=date.today().isoformat(),
    )


def write(found: Calibration, data_dir: Path) -> Path:
    """Keep it, whole or not at all; returns the file."""
    path = calibration_file(data_dir, machine_of(found))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(found.model_dump_json(indent=2) + "\n")
    draft.replace(path)
    return path


def _matmul_rate(device: Device, seconds: float) -> float:
    """Operations of the three products of a layer that widens: forward, and the gradients of input and weight."""
    tokens, width, wide = PRODUCT[device]
    x, weight, y = (_random(device, *shape) for shape in ((tokens, width), (width, wide), (tokens, wide)))

    def work() -> None:
        x @ weight, y @ weight.T, x.T @ y

    return 3 * 2 * tokens * width * wide / _median(device, seconds, work)


def _attention_rate(device: Device, seconds: float) -> float:
    """Operations of causal attention and its backward, counted over all pairs."""
    tokens, width, _ = PRODUCT[device]
    query, key, value = (_random(device, tokens // LENGTH, width // HEAD, LENGTH, HEAD) for _ in range(3))
    gradient, wanted = _random(device, *query.shape), [query, key, value]
    for each in wanted:
        each.requires_grad_()

    def work() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(query, key, value, is_causal=True), wanted, gradient)

    return 14 * tokens * LENGTH * width / _median(device, seconds, work)


def _activation_rate(device: Device, seconds: float) -> float:
    """Bytes kept by the other operations of a layer and by the loss, each passed so often as a prediction counts."""
    tokens, width, wide = PRODUCT[device]
    x, up, logits = (_random(device, tokens, size).requires_grad_() for size in (width, wide, 4 * wide))
    targets = torch.zeros(tokens, dtype=torch.int64, device=device)

    def work() -> None:
        layers = F.layer_norm(x, (width,)).sum() + F.gelu(up).sum() + (x + x).sum()
        torch.autograd.grad(layers + F.cross_entropy(logits.float(), targets), [x, up, logits])

    kept = x.itemsize * tokens * (3 * width + 2 * wide) + 4 * tokens * 2 * 4 * wide
    return ACTIVATION_PASSES * kept / _median(device, seconds, work)


def _norm_rate(device: Device, seconds: float) -> float:
    """Elements whose squares are summed a block at a time."""
    rows = torch.ones(STRIDE[device] // BLOCK, BLOCK, device=device)
    doubles, sums = rows.double(), torch.empty(len(rows), dtype=torch.float64, device=device)
    return rows.numel() / _median(device, seconds, lambda: block_sums(rows, 2, doubles, sums))


def _random(device: Device, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32 if device == "cpu" else torch.bfloat16, device=device)


def _memory_rate(device: str, seconds: float) -> float:
    """Bytes read and written by x += y."""
    x, y = (torch.ones(PASS_BYTES[device] // 4, device=device) for _ in range(2))
    return 3 * PASS_BYTES[device] / _median(device, seconds, lambda: x.add_(y))


def _exchange_rate(device: str, seconds: float) -> float:
    """Payload that arrives in this rank's memory."""
    size = PASS_BYTES[device]
    if device == "cuda":
        other = torch.device("cuda", 1 if torch.cuda.device_count() > 1 else 0)
        source, target = torch.ones(size // 4, device=other), torch.empty(size // 4, device="cuda:0")
        return size / _median(device, seconds, lambda: target.copy_(source))
    memory = _written_elsewhere(size)
    source, target = torch.frombuffer(memory, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    return size / _median(device, seconds, lambda: target.copy_(source))


def _written_elsewhere(size: int) -> mmap:
    """Shared memory that a child process has filled."""
    memory = mmap(-1, size)
    child = os.fork()
    if child == 0:
        memory.write(b"\1" * size)
        os._exit(0)
    os.waitpid(child, 0)
    return memory


def _median(device: str, seconds: float, work: Callable[[], object]) -> float:
    """Seconds of one call."""
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else int
    work()
    wait()
    taken, end = list[float](), time.perf_counter() + seconds
    while len(taken) < 3 or time.perf_counter() < end:
        begun = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def main() -> int:
    """Measure, keep and print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m workers.calibrate", description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the rank, on a CPU")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each rate")
    asked = parser.parse_args()
    found = calibrate(asked.device, asked.threads, asked.seconds)
    path = write(found, asked.data_dir.expanduser())
    print(json.dumps({**found.model_dump(), "file": str(path)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
