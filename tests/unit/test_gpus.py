"""A rank gets exactly one GPU, named by its UUID, whatever Ray does with CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.gpus import DeviceMismatch, Gpu, device_environment, gpus

TWO = (Gpu("0", "GPU-aaaa", 80 << 30), Gpu("1", "GPU-bbbb", 80 << 30))


def test_a_cpu_rank_sees_no_gpu() -> None:
    """Also on a machine with GPUs."""
    assert device_environment("cpu", "0,1", TWO) == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("given", ["1", "GPU-bbbb"])
def test_an_index_or_a_uuid_becomes_the_uuid(given: str) -> None:
    """The UUID means the same card in every process."""
    assert device_environment("cuda", given, TWO)["CUDA_VISIBLE_DEVICES"] == "GPU-bbbb"


@pytest.mark.parametrize("given", [None, "", "0,1"])
def test_no_gpu_or_several_are_an_error_that_says_what_was_given(given: str | None) -> None:
    """Unset (Ray after April 2026), empty (before) and too many: never silently the first card."""
    with pytest.raises(DeviceMismatch, match="exactly one"):
        device_environment("cuda", given, TWO)


def test_a_gpu_that_the_driver_does_not_know_is_an_error() -> None:
    """A stale index is not trusted."""
    with pytest.raises(DeviceMismatch, match="knows"):
        device_environment("cuda", "7", TWO)


def test_gpus_are_read_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Index, UUID and memory of each card; nothing where there is no driver or it fails."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aaaa, 81559'\necho '1, GPU-bbbb, 81559'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpus() == (Gpu("0", "GPU-aaaa", 81559 << 20), Gpu("1", "GPU-bbbb", 81559 << 20))
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert gpus() == ()
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert gpus() == ()
