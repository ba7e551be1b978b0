"""Runs what a porting page shows, before and after the change, as a script under a launcher would.

    python -m tests.distributed.porting_program RANK RANKS STORE PAGE...

Prints one JSON line per page: the validation loss of the weights that each program ends with; before: null where the
library is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, MICRO_BATCHES = 3, 8


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    """Four blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def micro_batch(step: int, index: int) -> tuple[Tensor, Tensor]:
    """The same eight micro-batches at every step, so that a list of them is a data set."""
    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(index))
    return inputs, inputs[:, :5].argmax(1)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)


def programs(page: str) -> tuple[str, str]:
    """What stands in the page's first diff block, before the change and after it."""
    found = re.search(r"```diff\n(.*?)```", page, re.DOTALL)
    assert found is not None
    lines = found[1].splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    return "\n".join(before), "\n".join(line[1:] for line in lines if not line.startswith("-"))


def names(rank: int, ranks: int) -> dict[str, Any]:
    """What a page takes for granted: a model, data, imports."""
    share = MICRO_BATCHES // ranks
    own = [micro_batch(0, index) for index in range(rank * share, (rank + 1) * share)]
    began = SimpleNamespace(init_process_group=lambda backend: None)  # the launcher has, once for all pages
    for name in ("get_rank", "get_world_size"):
        setattr(began, name, getattr(dist, name))
    return {
        **{"torch": torch, "nn": nn, "dist": began, "nullcontext": nullcontext, "Net": Net, "Block": Block},
        **{"steps": STEPS, "accumulation": share, "loss_of": loss_of, "data": SimpleNamespace(micro_batch=micro_batch)},
        "micro_batches": [SimpleNamespace(inputs=inputs, targets=targets) for inputs, targets in own],
    }


def weights_of(after: dict[str, Any]) -> dict[str, Tensor]:
    """Whole weights of what a program has made."""
    if "engine" in after:
        weights: dict[str, Tensor] = after["engine"].full_state_dict()
        after["engine"].close()
        return weights
    state = after["model"].state_dict()
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    return {name.removeprefix("module."): value.float() for name, value in whole.items()}


def ends_with(program: str, rank: int, ranks: int) -> float:
    """Run a program; the loss of its weights over all data."""
    after = names(rank, ranks)
    exec(compile(program, "page", "exec"), after)
    model = Net()
    model.load_state_dict(weights_of(after))
    with torch.no_grad():
        losses = [loss_of(model(inputs), targets) for inputs, targets in (micro_batch(0, i) for i in range(8))]
    return float(torch.stack(losses).mean())


def main() -> None:
    rank, ranks, store, *pages = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for page in pages:
        before, after = programs(Path(page).read_text())
        runs = "deepspeed" not in before or importlib.util.find_spec("deepspeed") is not None
        old = ends_with(before, rank, ranks) if runs else None
        print(json.dumps({"page": page, "before": old, "after": ends_with(after, rank, ranks)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
