"""The user's own nn.Module, imported in rank processes only."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from workers.spec.kinds import OUR_PACKAGES, PythonModel


class EntryError(Exception):
    """An entry point that gives no model, or one that gives no loss. `code` never changes once released."""

    code = "entry_failed"


def build_user_model(spec: PythonModel, seed: int) -> nn.Module:
    """Call the entry with its kwargs; torch's generator is seeded before, so that every rank builds the same weights.

    Raises EntryError for a folder or entry that cannot be one; what the user's code raises goes through unchanged.
    """
    module_name, _, function_name = spec.entry.partition(":")
    folder = Path(spec.path).resolve()
    _refuse_our_names(folder)
    if sys.path[0] != str(folder):
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    module = _imported(spec, module_name, folder)
    _refuse_elsewhere(module.__file__, folder, module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise EntryError(f"model.entry {spec.entry}: module {module_name} has no function {function_name}")
    torch.manual_seed(seed)
    model = function(**spec.kwargs)
    if not isinstance(model, nn.Module):
        raise EntryError(f"model.entry {spec.entry} returned {type(model).__name__}; it must return a torch.nn.Module")
    return model


def user_model_on_meta(spec: PythonModel, seed: int) -> nn.Module | None:
    """The model on the meta device, where weights take no memory; None where its code needs values."""
    try:
        with torch.device("meta"):
            return build_user_model(spec, seed)
    except (NotImplementedError, RuntimeError):
        return None


def gives_its_own_loss(model: nn.Module) -> bool:
    """Whether forward is forward(inputs, targets) -> loss, not forward(inputs) -> logits."""
    parameters = [
        each
        for each in inspect.signature(model.forward).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    required = [each for each in parameters if each.default is each.empty]
    return len(required) >= 2 or (len(parameters) >= 2 and parameters[1].name == "targets")


def logits_of(given: object, model: nn.Module) -> Tensor:
    """What forward(inputs) gave, if it can be logits. Raises EntryError."""
    if not isinstance(given, Tensor) or not given.dim():
        raise EntryError(
            f"the model of model.entry (class {type(model).__name__}) returned {_named(given)} from forward(inputs); "
            "return the logits alone, one tensor (…, classes), or take the targets too, forward(inputs, targets), and "
            "return the loss"
        )
    return given


def loss_from(given: object, model: nn.Module) -> Tensor:
    """What forward(inputs, targets) gave, if it can be a loss. Raises EntryError."""
    if not isinstance(given, Tensor) or given.numel() != 1:
        raise EntryError(
            f"the model of model.entry (class {type(model).__name__}) returned {_named(given)} from forward(inputs, "
            "targets); return the loss alone, a tensor with one number, the mean over the targets"
        )
    return given


def _named(given: object) -> str:
    if isinstance(given, Tensor):
        return f"a tensor of shape {tuple(given.shape)}"
    if isinstance(given, tuple | list):
        return f"a {type(given).__name__} of {len(given)}"
    return "nothing" if given is None else f"a {type(given).__name__}"


def _imported(spec: PythonModel, module_name: str, folder: Path) -> ModuleType:
    """The user's module. Raises EntryError when it is not there; ModuleNotFoundError for one that it lacks itself."""
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise EntryError(
            f"model.entry {spec.entry}: there is no module {error.name} in model.path {folder} (ModuleNotFoundError); "
            f"put {module_name.replace('.', '/')}.py there, or name the folder that holds it"
        ) from error


def _refuse_our_names(folder: Path) -> None:
    for name in sorted(OUR_PACKAGES):
        if (folder / name).is_dir() or (folder / f"{name}.py").is_file():
            raise EntryError(f"model.path {folder} holds {name}, a name that belongs to Shardyard itself; rename it")


def _refuse_elsewhere(file: str | None, folder: Path, module_name: str) -> None:
    if file is None or not Path(file).resolve().is_relative_to(folder):
        raise EntryError(
            f"model.entry: module {module_name} was found at {file or 'no file'}, not in model.path {folder}; "
            "another module has the same name, so rename yours"
        )
