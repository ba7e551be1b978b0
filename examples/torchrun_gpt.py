"""The engine without the service: torchrun --nproc-per-node 2 examples/torchrun_gpt.py [--stage 3]"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F

from workers.models.gpt import Gpt
from workers.models.initial import gpt_values
from zero_engine import AdamW, Engine, ZeroConfig

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--steps", type=int, default=20)
stage, steps = vars(parser.parse_args()).values()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
with torch.device("meta"):  # no rank ever holds more than its shards and one unit
    model = Gpt(vocabulary=256, layers=4, hidden=128, heads=4, context=64, dropout=0.1, tied=True)
config = ZeroConfig(stage=stage, micro_batches=4, chunk=1, gradient_clipping=1.0)  # same bits on 1 to 4 ranks
engine = Engine(model, config, optimizer=AdamW(lr=1e-3), device=device, initial=gpt_values(seed=1, layers=4))
text = torch.tensor(list(b"To shard or not to shard, that is the question. " * 40))

for step in range(steps):
    for _ in engine.micro_batches():
        starts = torch.randint(len(text) - 65, (8,))  # seeded by the engine from (seed, step, micro-batch)
        batch = torch.stack([text[start : start + 65] for start in starts]).to(device)
        logits = engine.module(batch[:, :-1])
        engine.backward(F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()))
    result = engine.step()
    if dist.get_rank() == 0:
        print(f"step {step + 1}  loss {result.loss:.4f}  norm {result.grad_norm:.3f}")

digest = engine.digest()  # a collective call
if dist.get_rank() == 0:
    print("digest", digest, " bytes by category", engine.memory())
dist.destroy_process_group()
