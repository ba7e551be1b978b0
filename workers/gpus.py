"""The GPUs of a node as the driver names them, and the one that a rank was given. Starts nvidia-smi, never CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass


class DeviceMismatch(Exception):
    """Ray did not give this rank exactly one GPU of its own."""


@dataclass(frozen=True)
class Gpu:
    """One GPU of this machine."""

    index: str
    uuid: str
    memory_bytes: int


def gpus() -> tuple[Gpu, ...]:
    """All GPUs of this machine; empty where there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [line.split(", ") for line in said.splitlines()]
    return tuple(Gpu(row[0], row[1], int(float(row[2])) << 20) for row in rows if len(row) == 3)


def device_environment(device: str, visible: str | None, known: tuple[Gpu, ...]) -> dict[str, str]:
    """A rank's device variables, checked: on CUDA exactly one GPU, named by its UUID where the driver tells it.

    Ray after April 2026 leaves CUDA_VISIBLE_DEVICES unset for an actor that did not ask for GPUs itself, so that every
    rank would see all of them and silently take the first.

    Args:
        device: "cpu" or "cuda".
        visible: CUDA_VISIBLE_DEVICES as Ray set it, None when unset.
        known: the GPUs of this machine.

    Raises DeviceMismatch with what was given and what there is.
    """
    if device != "cuda":
        return {"CUDA_VISIBLE_DEVICES": ""}
    given = [item for item in (visible or "").split(",") if item]
    if len(given) != 1:
        raise DeviceMismatch(f"Ray gave this rank CUDA_VISIBLE_DEVICES={visible!r}; exactly one GPU was asked for")
    uuids = {gpu.index: gpu.uuid for gpu in known} | {gpu.uuid: gpu.uuid for gpu in known}
    if known and given[0] not in uuids:
        raise DeviceMismatch(f"Ray gave this rank GPU {given[0]}; the driver knows {sorted(uuids)}")
    uuid = uuids.get(given[0], given[0])
    return {"CUDA_VISIBLE_DEVICES": uuid, "SHARDYARD_DEVICE": uuid}


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES of this process, None when unset."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")
