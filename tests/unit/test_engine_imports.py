"""The torch-free part of the engine stays torch-free."""

from __future__ import annotations

import subprocess
import sys

import pytest

TORCH_FREE = ("config", "errors", "layout", "buckets", "fold", "windows", "plan", "reshard", "manifest", "store")


@pytest.mark.parametrize("module", ["zero_engine", *(f"zero_engine.{name}" for name in TORCH_FREE)])
def test_a_fresh_interpreter_loads_no_torch(module: str) -> None:
    """Planning and checkpoint bookkeeping run on a server without torch in memory."""
    code = f"import sys, {module}; from zero_engine import ZeroConfig, plan_of; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
