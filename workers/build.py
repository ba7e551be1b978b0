"""From a spec to what is trained: model, loss, optimizer, engine."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.data.batches import Batch, Data
from workers.models.gpt import Gpt
from workers.models.initial import initialise_gpt, initialise_mlp
from workers.models.mlp import Mlp
from workers.models.python import build_user_model, gives_its_own_loss
from workers.shapes import DECAY, decay_group
from workers.spec import AdamWSpec, GptModel, JobSpec, MlpModel, PythonModel
from zero_engine import AdamW

Loss = Callable[[nn.Module, Batch], Tensor]  # the mean over the batch's targets, a scalar


def build_model(spec: JobSpec, data: Data) -> nn.Module:
    """The model with its first bits, on the CPU. Raises EntryError, and whatever the user's code raises."""
    seed = spec.train.seed
    match spec.model:
        case GptModel() as shape:
            gpt = Gpt(
                vocabulary=data.inputs,
                layers=shape.layers,
                hidden=shape.hidden,
                heads=shape.heads,
                context=shape.context,
                dropout=shape.dropout,
                tied=shape.tied,
            )
            initialise_gpt(gpt, seed, shape.layers)
            return gpt
        case MlpModel() as shape:
            mlp = Mlp(inputs=data.inputs, hidden=shape.hidden, outputs=data.outputs)
            initialise_mlp(mlp, seed)
            return mlp
        case PythonModel() as user:
            return build_user_model(user, seed)


def loss_of(model: nn.Module) -> Loss:
    """How a batch becomes a loss: the model's own where it takes targets, else cross-entropy of its logits."""
    return _own_loss if gives_its_own_loss(model) else _cross_entropy


def _own_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(batch.inputs, batch.targets)
    return loss


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(batch.inputs)
    return F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), batch.targets.reshape(-1))


def optimizer_of(spec: AdamWSpec) -> AdamW:
    """AdamW in two groups: weights decay, norms and biases do not."""
    decayed = {"params": _decays, "weight_decay": spec.weight_decay}
    betas = (spec.betas[0], spec.betas[1])
    return AdamW(lr=spec.lr, betas=betas, weight_decay=0.0, groups=[decayed])


def _decays(name: str, parameter: nn.Parameter) -> bool:
    return decay_group(name, parameter.dim()) == DECAY


def prepare_device(spec: JobSpec, device: torch.device) -> None:
    """Threads, and on CUDA the current device and deterministic kernels."""
    torch.set_num_threads(spec.resources.threads_per_rank)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(spec.train.deterministic)
        torch.backends.cudnn.benchmark = not spec.train.deterministic


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device."""
    if device.type == "cpu":
        return batch
    return Batch(batch.inputs.to(device, non_blocking=True), batch.targets.to(device, non_blocking=True))
