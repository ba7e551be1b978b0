"""What no engine can train exactly is refused by name, before anything is built or run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from zero_engine.errors import ModelError, UsageError
from zero_engine.layout import Layout
from zero_engine.released import ReleasedParameter


def require_supported(model: nn.Module) -> None:
    """Raises ModelError naming the first parameter or module that cannot be trained."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ModelError(f"the model is wrapped in {type(model).__name__}; give the one inside, model.module")
    names = [name for name, _ in model.named_parameters()]
    if not names:
        raise ModelError(f"the model, a {type(model).__name__}, has no parameters, so there is nothing to train")
    for name in names:
        if isinstance(model.get_parameter(name), ReleasedParameter):
            raise ModelError(
                f"the weights of parameter '{name}' went with an engine that sharded them; build the model again, and "
                "load what engine.full_state_dict() gave before close(), or a checkpoint"
            )
        if isinstance(model.get_parameter(name), nn.UninitializedParameter):
            raise ModelError(f"parameter '{name}' has no shape yet (a lazy module); run one forward before the engine")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            if module.sparse:
                raise ModelError(f"module '{name}' makes sparse gradients, which have no flat place; use sparse=False")
            if module.max_norm is not None:
                raise ModelError(
                    f"module '{name}' writes to its weight in forward (max_norm={module.max_norm}), so that micro-"
                    "batches would depend on each other; scale what it returns instead"
                )


def require_no_gradients(layout: Layout, parameters: Sequence[nn.Parameter]) -> None:
    """`parameters`: by number. Raises UsageError naming the first that has a gradient."""
    for entry, parameter in zip(layout.canonical_entries, parameters, strict=True):
        if parameter.grad is not None:
            raise UsageError(
                f"parameter '{entry.spec.name}' has a gradient that this engine did not make (from before it, or from "
                "a micro-batch in which the parameter was unfrozen), which would be added to the next; call "
                "model.zero_grad(set_to_none=True) first"
            )


def require_open_units(model: nn.Module, layout: Layout) -> None:
    """Stage 3 opens and closes units by hooks, which must run as Python. Raises ModelError for a compiled module that
    holds them inside.
    """
    units = [unit.name for unit in layout.units[1:]]
    for name, module in model.named_modules():
        inside = [unit for unit in units if unit == name or not name or unit.startswith(name + ".")]
        in_place = module._compiled_call_impl is not None
        if inside and (in_place or (type(module).__name__ == "OptimizedModule" and name not in units)):
            raise ModelError(
                f"module '{name or 'the model'}' is compiled with unit '{inside[0]}' inside, whose weights come and go "
                "at stage 3; compile the units alone (blocks[i] = torch.compile(blocks[i])), or use stage 2"
            )


def require_loss(loss: object, weight: float | None) -> None:
    """Raises UsageError for what `backward` cannot take."""
    if not isinstance(loss, Tensor):
        raise UsageError(f"the loss is a {type(loss).__name__}; give the tensor that the model's output was made into")
    if loss.numel() != 1:
        raise UsageError(f"the loss has shape {tuple(loss.shape)}; reduce it to one number")
    if not loss.requires_grad:
        raise UsageError("the loss depends on no parameter that trains (detached, under no_grad, or all are frozen)")
    if weight is not None and not (math.isfinite(weight) and weight >= 0):
        raise UsageError(f"the weight of a loss is {weight}; use a finite number of at least 0, such as its tokens")
