"""`python -m workers.calibrate`: what this machine reaches, in about ten seconds; written to the data folder.

For one rank, or one GPU: large matrix products (fp32; bf16 on CUDA), an element-wise pass over memory
that no cache holds, and payload from one process to another, through the memory that ranks of a node share (on a CPU)
or between two GPUs. Each is the median of rounds, so that a busy moment does not decide.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from mmap import mmap
from pathlib import Path

import torch

from workers.calibrations import calibration_file, machine_of, this_machine
from workers.step_time import Calibration, Device

SECONDS = 3.0  # for each of the three
PRODUCT = {"cpu": 1024, "cuda": 8192}  # rows and columns
PASS_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}


def calibrate(device: Device, threads: int = 1, seconds: float = SECONDS) -> Calibration:
    """Measure; leaves torch with so many threads."""
    torch.set_num_threads(threads)
    here = this_machine(device, threads)
    return Calibration(
        device=device,
        hardware=here.hardware or torch.cuda.get_device_name(0),
        torch=here.torch,
        cores=here.cores,
        threads=here.threads,
        matmul_flops=_matmul_rate(device, seconds),
        memory_bytes=_memory_rate(device, seconds),
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


def _matmul_rate(device: str, seconds: float) -> float:
    size, dtype = PRODUCT[device], torch.float32 if device == "cpu" else torch.bfloat16
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / _median(device, seconds, lambda: torch.mm(left, right, out=out))


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
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each of the three rates")
    asked = parser.parse_args()
    found = calibrate(asked.device, asked.threads, asked.seconds)
    path = write(found, asked.data_dir.expanduser())
    print(json.dumps({**found.model_dump(), "file": str(path)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
