"""The job of submit_latency.py under torchrun and under Ray Train: the same MLP on digits, plain DDP, 2 gloo ranks.

    torchrun --nproc-per-node 2 benchmarks/submit_peers.py          python benchmarks/submit_peers.py ray ADDRESS

Rank 0 writes the time (seconds since the epoch) of its first optimizer step to $PEER_FOLDER/first-step; the caller
knows when it began.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

RANKS = 2
BATCH = 8


def train(config: dict[str, Any]) -> None:
    """Build, wrap, take one step; the process group stands already. `config`: the folder to write to."""
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(1)
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images, dtype=torch.float32), torch.tensor(labels)
    sizes = [64, 128, 64, 32, 10]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model = DistributedDataParallel(nn.Sequential(*layers[:-1]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    start = dist.get_rank() * BATCH
    loss = nn.functional.cross_entropy(model(inputs[start : start + BATCH]), targets[start : start + BATCH])
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        Path(config["folder"], "first-step").write_text(f"{time.time():.3f}")


def under_ray(address: str) -> None:
    """A driver that connects to a running head and trains through TorchTrainer."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address=address, log_to_driver=True, logging_level="error", _node_ip_address="127.0.0.1")
    scaling = ScalingConfig(num_workers=RANKS, use_gpu=False, resources_per_worker={"CPU": 1})
    folder = os.environ["PEER_FOLDER"]
    storage = RunConfig(storage_path=folder)
    TorchTrainer(train, train_loop_config={"folder": folder}, scaling_config=scaling, run_config=storage).fit()


if __name__ == "__main__":
    if sys.argv[1:2] == ["ray"]:
        under_ray(sys.argv[2])
    else:
        import torch.distributed

        torch.distributed.init_process_group("gloo")
        train({"folder": os.environ["PEER_FOLDER"]})
        torch.distributed.destroy_process_group()
