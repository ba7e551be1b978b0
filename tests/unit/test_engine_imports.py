"""The torch-free part of the engine stays torch-free."""

from __future__ import annotations

import subprocess
import sys

TORCH_FREE = ("config", "errors", "layout", "buckets", "fold", "windows", "plan", "reshard", "manifest", "store")


LOOK = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name, "torch" in sys.modules)
from zero_engine import ZeroConfig, plan_of
print("torch" in sys.modules)
"""


def test_a_fresh_interpreter_loads_no_torch() -> None:
    """Planning and checkpoint bookkeeping run on a server without torch in memory; the first that loads it is named."""
    modules = ["zero_engine", *(f"zero_engine.{name}" for name in TORCH_FREE)]
    run = subprocess.run([sys.executable, "-c", LOOK, *modules], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [*(f"{module} False" for module in modules), "False"]
