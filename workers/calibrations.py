"""Calibrations that a data folder keeps: one for each machine, torch build and number of threads. Torch-free.

Rates hold for the very machine that was measured. So a file is named by what rates depend on, and one of another
machine is not taken for this one's: a plan then says what is there and how to get what is missing.

Note: why nobody calibrates by itself. Measuring takes a core and the memory bus for ten seconds. Beside a run it would
slow the run and measure the run; and whether a machine is idle is not known to an agent, which sees only our own jobs.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from workers.step_time import Calibration, Device


@dataclass(frozen=True)
class Machine:
    """What rates depend on."""

    device: Device
    hardware: str  # model of the processor or of the GPU; "" where there is no such device here
    cores: int  # of the processor, that this process may use
    threads: int  # of a rank
    torch: str  # version of the installed build

    def __str__(self) -> str:
        cores = f", {self.cores} cores, {self.threads} a rank" if self.device == "cpu" else ""
        return f"{self.hardware or 'an unknown GPU'}{cores}, torch {self.torch}"


@dataclass(frozen=True)
class Known:
    """What a data folder knows of a machine."""

    rates: Calibration | None
    note: str  # whose rates they are; without any, why and how to get them


def this_machine(device: Device, threads: int = 1) -> Machine:
    """The machine that this runs on."""
    hardware = _gpu() if device == "cuda" else _processor()
    return Machine(device, hardware, len(os.sched_getaffinity(0)), threads if device == "cpu" else 1, _torch())


def machine_of(found: Calibration) -> Machine:
    """The machine that was measured."""
    return Machine(found.device, found.hardware, found.cores, found.threads, found.torch)


def calibration_file(data_dir: Path, machine: Machine) -> Path:
    """Where a machine's rates are kept."""
    parts = [machine.device, machine.hardware, f"{machine.cores}c", f"{machine.threads}t", f"torch-{machine.torch}"]
    return data_dir / "calibration" / (re.sub(r"[^a-z0-9.+]+", "-", "-".join(parts).lower()) + ".json")


def known_calibration(data_dir: Path, device: Device, threads: int = 1) -> Known:
    """This machine's rates for ranks of so many threads, if it was calibrated.

    A server without GPUs takes those measured on a node and copied here, of the torch build that it has itself.
    """
    here = this_machine(device, threads)
    kept = [found for path in _kept(data_dir, device) if (found := _read(path)) is not None]
    elsewhere = device == "cuda" and not here.hardware
    for found in kept:
        if machine_of(found) == here or (elsewhere and found.torch == here.torch):
            return Known(found, f"Calibrated {f'on {found.day}, ' if found.day else ''}{machine_of(found)}.")
    return Known(None, _missing(here, [machine_of(found) for found in kept], elsewhere))


def _missing(here: Machine, others: list[Machine], elsewhere: bool) -> str:
    more = f" --threads {here.threads}" if here.threads > 1 else ""
    command = f"`shardyard calibrate --device {here.device}{more}`"
    if elsewhere:
        how = f"run {command} on a node with this kind of GPU and copy its file to calibration/ in the server's folder"
    else:
        how = f"run {command} (ten seconds) while this machine is idle"
    if others:
        return f"No step times: the calibration kept is of {others[0]}, and this is {here}; {how}."
    return f"No step times: there is no calibration of {here}; {how}."


def _kept(data_dir: Path, device: Device) -> list[Path]:
    """Newest first."""
    paths = [(path.stat().st_mtime, path) for path in (data_dir / "calibration").glob(f"{device}-*.json")]
    return [path for _, path in sorted(paths, reverse=True)]


def _read(path: Path) -> Calibration | None:
    """None for a file that cannot be read as one."""
    try:
        return Calibration.model_validate_json(path.read_text())
    except (OSError, ValueError, ValidationError):
        return None


@lru_cache(maxsize=1)
def _torch() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "none"


@lru_cache(maxsize=1)
def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def _gpu() -> str:
    """The first GPU as the driver names it; "" without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=name", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.partition("\n")[0].strip()
