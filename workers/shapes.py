"""Names, shapes, units and optimizer groups of our models without torch: what a plan needs before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from workers.spec import GptModel, MlpModel
from zero_engine.layout import ParameterSpec

DECAY, NO_DECAY = 0, 1  # optimizer groups: weights; norms and biases


def decay_group(name: str, dimensions: int) -> int:
    """The optimizer group of a parameter: what has fewer than two dimensions (norms, biases) is not decayed."""
    return DECAY if dimensions >= 2 and not name.endswith("bias") else NO_DECAY


def gpt_parameters(model: GptModel, vocabulary: int) -> list[ParameterSpec]:
    """The parameters of `workers.models.gpt.Gpt` in the order of named_parameters()."""
    width = model.hidden
    head = "lm_head.weight"
    found = [
        _parameter("wte.weight", (vocabulary, width), aliases=(head,) if model.tied else ()),
        _parameter("wpe.weight", (model.context, width)),
    ]
    for layer in range(model.layers):
        name = f"h.{layer}"
        unit = name if model.layers > 1 else ""  # the engine takes a list of one for no list
        found += [_parameter(f"{name}.{part}", shape, unit) for part, shape in _block(width)]
    found += [_parameter("ln_f.weight", (width,)), _parameter("ln_f.bias", (width,))]
    return found if model.tied else [*found, _parameter(head, (vocabulary, width))]


def _block(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for norm, first, second, outer, inner in (
        ("ln_1", "attn.c_attn", "attn.c_proj", 3, 1),
        ("ln_2", "mlp.c_fc", "mlp.c_proj", 4, 4),
    ):
        yield f"{norm}.weight", (width,)
        yield f"{norm}.bias", (width,)
        yield f"{first}.weight", (width, outer * width)
        yield f"{first}.bias", (outer * width,)
        yield f"{second}.weight", (inner * width, width)
        yield f"{second}.bias", (width,)


def mlp_parameters(model: MlpModel, inputs: int, outputs: int) -> list[ParameterSpec]:
    """The parameters of `workers.models.mlp.Mlp` in the order of named_parameters()."""
    widths: Sequence[int] = [inputs, *model.hidden, outputs]
    found = []
    for number, (before, after) in enumerate(pairwise(widths)):
        unit = f"layers.{number}"
        found += [_parameter(f"{unit}.weight", (after, before), unit), _parameter(f"{unit}.bias", (after,), unit)]
    return found


def _parameter(name: str, shape: tuple[int, ...], unit: str = "", aliases: tuple[str, ...] = ()) -> ParameterSpec:
    return ParameterSpec(name, shape, unit=unit, group=decay_group(name, len(shape)), aliases=aliases)
