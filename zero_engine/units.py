"""Which modules are sharding units: named by the user, or the children of the longest list of one class."""

from __future__ import annotations

from torch import nn

from zero_engine.errors import ConfigError


def find_units(model: nn.Module, chosen: tuple[type | str, ...]) -> dict[str, nn.Module]:
    """Unit modules by name, in registration order. A module with two names is none: the root unit owns it."""
    names = _chosen(model, chosen) if chosen else _longest_list(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    seen: dict[nn.Module, int] = {}
    for module in modules.values():
        seen[module] = seen.get(module, 0) + 1
    units = {name: modules[name] for name in names if seen[modules[name]] == 1 and _owns_parameters(modules[name])}
    for name in units:
        inner = next((other for other in units if other.startswith(name + ".")), None)
        if inner is not None:
            raise ConfigError(f"unit '{inner}' stands inside unit '{name}'; name only one of them in `units`")
    return units


def _chosen(model: nn.Module, chosen: tuple[type | str, ...]) -> list[str]:
    modules = dict(model.named_modules())
    for choice in chosen:
        if isinstance(choice, str) and choice not in modules:
            raise ConfigError(f"units names '{choice}', which is no module of this {type(model).__name__}")
        if isinstance(choice, type) and not any(isinstance(module, choice) for module in modules.values()):
            raise ConfigError(f"units names the class {choice.__name__}, of which this {type(model).__name__} has none")
    classes = tuple(choice for choice in chosen if isinstance(choice, type))
    return [name for name, module in modules.items() if name and (name in chosen or isinstance(module, classes))]


def _longest_list(model: nn.Module) -> list[str]:
    best: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = list(module.named_children())
            if len({type(child) for _, child in children}) == 1 and len(children) > max(1, len(best)):
                best = [f"{name}.{key}" if name else key for key, _ in children]
    return best


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
