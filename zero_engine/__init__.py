"""ZeRO stages 0 to 3 on plain PyTorch: one layout, one order of the sum, the same bits at every stage and rank count.

Read `layout.py` first (where every element lives), then `fold.py` (in which order gradients are summed), then
`strategy.py` and the four stage files, each of which reads like its section of the paper. `engine.py` is the public
face.

This package knows tensors and process groups and nothing of jobs: it must not import `workers` or `server`, and only
torch, safetensors, xxhash and the standard library. `config`, `layout`, `fold`, `plan`, `reshard`, `manifest` and
`store` are torch-free; importing `zero_engine` itself loads no torch.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Adam": "optimizers",
    "AdamW": "adamw",
    "EMA": "optimizers",
    "ElementWise": "optimizers",
    "Engine": "engine",
    "Layout": "layout",
    "Lion": "optimizers",
    "ParameterSpec": "layout",
    "SGD": "optimizers",
    "StepResult": "step_result",
    "ZeroConfig": "config",
    "builds_here": "group",
    "digest_of": "digest",
    "initialise": "reset",
    "plan_of": "plan",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for, so that the torch-free files stay torch-free."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'zero_engine' has no attribute {name!r}")
    return getattr(import_module(f"zero_engine.{_PUBLIC[name]}"), name)
