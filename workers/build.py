"""From a spec to what is trained: model, loss, optimizer, engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.data.batches import Batch, Data
from workers.models.gpt import Gpt
from workers.models.initial import Values, folder_values, gpt_values, mlp_values
from workers.models.mlp import Mlp
from workers.models.python import build_user_model, gives_its_own_loss, logits_of, loss_from, user_model_on_meta
from workers.shapes import DECAY, decay_group
from workers.spec import AdamSpec, GptModel, JobSpec, LionSpec, MlpModel, OptimizerSpec, PythonModel, SGDSpec
from zero_engine.adamw import AdamW, Optimizer
from zero_engine.hollow import stray_tensors
from zero_engine.optimizers import SGD, Adam, Lion

SHARDED_WEIGHTS = 3  # the stage at which no rank keeps a whole model

Loss = Callable[[nn.Module, Batch], Tensor]  # the mean over the batch's targets, a scalar


@dataclass(frozen=True)
class Start:
    """A model as an engine takes it: built, or on the meta device, where it takes no memory."""

    model: nn.Module
    initial: Values | None = None  # gives first values by name; None: the model's own, or those that its node is sent


def start_of(spec: JobSpec, data: Data, builds: Callable[[], bool]) -> Start:
    """Ours start in shards from their parameters' names; a user's is built once a node where weights are sharded.

    `builds`: whether this rank is the one of its node; collective. The same bits as `build_model` gives. Raises
    EntryError, and whatever the user's code raises.
    """
    match spec.model:
        case GptModel() | MlpModel():
            with torch.device("meta"):
                return Start(_bare(spec.model, data), _values_of(spec.model, spec.train.seed))
        case PythonModel() as user:
            sent = spec.zero.stage == SHARDED_WEIGHTS and not builds()
            model = _on_meta(user, spec.train.seed) if sent else None
            return Start(build_user_model(user, spec.train.seed) if model is None else model)


def build_model(spec: JobSpec, data: Data) -> nn.Module:
    """The model with its first bits, on the CPU. Raises EntryError, and whatever the user's code raises."""
    if isinstance(spec.model, PythonModel):
        return build_user_model(spec.model, spec.train.seed)
    model, write = _bare(spec.model, data), _values_of(spec.model, spec.train.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            write(name, parameter)
    return model


def _bare(shape: GptModel | MlpModel, data: Data) -> nn.Module:
    """One of ours, on torch's default device."""
    if isinstance(shape, MlpModel):
        return Mlp(inputs=data.inputs, hidden=shape.hidden, outputs=data.outputs)
    return Gpt(
        vocabulary=data.inputs,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        context=shape.context,
        dropout=shape.dropout,
        tied=shape.tied,
    )


def _values_of(shape: GptModel | MlpModel, seed: int) -> Values:
    if isinstance(shape, MlpModel):
        return mlp_values(seed)
    return gpt_values(seed, shape.layers) if shape.start is None else folder_values(Path(shape.start))


def _on_meta(user: PythonModel, seed: int) -> nn.Module | None:
    """The user's model without memory; None where their code needs values, or keeps some outside its state."""
    model = user_model_on_meta(user, seed)
    if model is None or not all(parameter.is_meta for parameter in model.parameters()):
        return None
    return model if next(stray_tensors(model), None) is None else None


def loss_of(model: nn.Module) -> Loss:
    """How a batch becomes a loss: the model's own where it takes targets, else cross-entropy of its logits.

    The loss raises EntryError for a model that returns something else.
    """
    return _own_loss if gives_its_own_loss(model) else _cross_entropy


def _own_loss(model: nn.Module, batch: Batch) -> Tensor:
    return loss_from(model(batch.inputs, batch.targets), model)


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    logits = logits_of(model(batch.inputs), model)
    return F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), batch.targets.reshape(-1))


def optimizer_of(spec: OptimizerSpec) -> Optimizer:
    """The optimizer in two groups: weights decay, norms and biases do not."""
    groups = [{"params": _decays, "weight_decay": spec.weight_decay}]
    if isinstance(spec, SGDSpec):
        return SGD(spec.lr, spec.momentum, weight_decay=0.0, nesterov=spec.nesterov, groups=groups)
    betas = (spec.betas[0], spec.betas[1])
    if isinstance(spec, LionSpec):
        return Lion(spec.lr, betas, weight_decay=0.0, groups=groups)
    kind = Adam if isinstance(spec, AdamSpec) else AdamW
    return kind(spec.lr, betas, weight_decay=0.0, groups=groups)


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
