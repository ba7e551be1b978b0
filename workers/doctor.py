"""`python -m workers.doctor`: what training needs of this machine, tried for real; one JSON object per line.

Each line has `name`, `status` (ok, warn or fail), `detail` and, unless ok, `remedy`. `shardyard doctor` runs this as a
process, since torch and Ray live here, and adds what the server needs.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from workers.gpus import gpus
from workers.kill_pipe import kernel_kills

LEAST_PYTHON = (3, 11)
LEAST_TORCH = (2, 11)


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""


def check_python() -> Finding:
    """The interpreter is new enough."""
    detail = f"Python {platform.python_version()} at {sys.executable}"
    if sys.version_info < LEAST_PYTHON:
        return Finding("python", "fail", detail, "install Python 3.11 or newer")
    return Finding("python", "ok", detail)


def check_torch() -> Finding:
    """torch loads, is new enough and can multiply."""
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    ones = torch.ones(8, 8)
    right = bool((ones @ ones == 8).all())
    detail = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores"
    if version < LEAST_TORCH or not right:
        return Finding("torch", "fail", detail, "install torch 2.11 or newer: pip install 'torch>=2.11'")
    return Finding("torch", "ok", detail)


def check_gloo() -> Finding:
    """A process group of gloo comes up on loopback and sums."""
    import torch
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        try:
            value = torch.ones(4)
            dist.all_reduce(value)
        finally:
            dist.destroy_process_group()
    return Finding("gloo", "ok", "a process group came up")


def check_cuda() -> Finding:
    """GPUs that the driver names are GPUs that torch and NCCL can use."""
    import torch
    import torch.distributed as dist

    known = gpus()
    if not torch.cuda.is_available():
        if known:
            remedy = "the driver sees GPUs, torch does not: install a CUDA build of torch that fits the driver"
            return Finding("cuda", "fail", f"{len(known)} GPUs, torch {torch.__version__} without them", remedy)
        return Finding("cuda", "ok", "no GPU here; ranks run on CPU")
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    with tempfile.TemporaryDirectory() as folder:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        try:
            value = torch.ones(4, device="cuda")
            dist.all_reduce(value)
            torch.cuda.synchronize()
        finally:
            dist.destroy_process_group()
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return Finding("cuda", "ok", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}; NCCL {version} works")


def check_ray() -> Finding:
    """Ray loads."""
    import ray

    return Finding("ray", "ok", f"ray {ray.__version__}")


def check_kill_pipe() -> Finding:
    """This kernel ends a process group when the writer of its pipe dies."""
    if kernel_kills():
        return Finding("kill pipe", "ok", f"works on Linux {platform.release()}")
    remedy = "nothing: a watcher process per rank takes its place, a little slower"
    return Finding("kill pipe", "warn", f"the kernel {platform.release()} does not signal the group", remedy)


def check_linux() -> Finding:
    """What the supervision of processes stands on."""
    missing = [name for name in ("pidfd_open", "memfd_create") if not hasattr(os, name)]
    if missing or not os.path.exists("/proc/self/stat"):
        detail = ", ".join([*missing, *([] if os.path.exists("/proc/self/stat") else ["/proc"])]) + " missing"
        return Finding("linux", "fail", detail, "run on Linux 5.3 or newer with /proc mounted")
    return Finding("linux", "ok", f"{platform.system()} {platform.release()}")


CHECKS: dict[str, Callable[[], Finding]] = {
    "python": check_python,
    "linux": check_linux,
    "kill pipe": check_kill_pipe,
    "torch": check_torch,
    "gloo": check_gloo,
    "cuda": check_cuda,
    "ray": check_ray,
}
PACKAGE_OF = {"torch": "torch", "gloo": "torch", "cuda": "torch", "ray": "ray"}


def examine() -> Iterator[Finding]:
    """Every check in order; one that raises is a finding, not an end."""
    for name, check in CHECKS.items():
        try:
            yield check()
        except Exception as error:
            yield Finding(name, "fail", f"{type(error).__name__}: {error}", _remedy(name))


def _remedy(name: str) -> str:
    package = PACKAGE_OF.get(name)
    if package is None:
        return "see the message"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"{package} is not installed: pip install {package}"
    return f"{package} {version} is installed and does not work here; install it again, or another build"


if __name__ == "__main__":
    for finding in examine():
        print(json.dumps(asdict(finding), ensure_ascii=False), flush=True)
