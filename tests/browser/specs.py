"""Specs of the browser tests: seconds each, on two CPU cores."""

from __future__ import annotations

import io
from pathlib import Path

from ruamel.yaml import YAML

from server.cli.client import Json


def digits(name: str, steps: int = 60, ranks: int = 2, stage: int | str = 2, hidden: int = 64) -> Json:
    """An MLP on scikit-learn's digits."""
    return {
        "name": name,
        "model": {"kind": "mlp", "hidden": [hidden, hidden, 32]},
        "data": {"kind": "digits"},
        "train": {"steps": steps, "global_batch": 64, "micro_batch": 16, "eval": {"every": 50}},
        "zero": {"stage": stage},
        "resources": {"ranks": ranks},
        "checkpoint": {"every": 50},
    }


def own_model(name: str, folder: Path, entry: str, steps: int = 60) -> Json:
    """A user's model: `odd:build` prints markup and reports NaN at times, `wrong:build` fails in its first forward."""
    (folder / "odd.py").write_text(ODD)
    (folder / "wrong.py").write_text(WRONG)
    return {**digits(name, steps), "model": {"kind": "python", "entry": entry, "path": str(folder)}}


# Its loss is NaN at steps 21 to 24 and 31, with finite gradients: the constant that is added has none.
ODD = """
import torch
from torch import nn


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.calls = 0

    def forward(self, inputs, targets):
        loss = nn.functional.cross_entropy(self.net(inputs), targets)
        if not self.training:
            return loss
        self.calls += 1
        step = (self.calls + 1) // 2
        if step == 5 and self.calls % 2:
            print("<b id=hacked>训练 & تدريب</b> \\x1b[31mred\\x1b[0m", flush=True)
        if self.calls % 40 == 0:
            print("call", self.calls, flush=True)
        return loss + (float("nan") if step in (21, 22, 23, 24, 31) else 0.0)


def build():
    return Odd()
"""


WRONG = """
from torch import nn


def build():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(48, 10))
"""


def as_yaml(spec: Json) -> str:
    """A spec as block-style YAML, one field a line."""
    text = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.dump(spec, text)
    return text.getvalue()
