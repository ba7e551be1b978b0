"""The reference page of a job spec, made from the models: `python -m workers.spec.reference > docs/job-spec.md`."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from workers.spec.models import JobSpec
from workers.spec.problems import arms_of

_HEAD = """\
# The job spec

A job spec is one YAML 1.2 or JSON document of at most 1 MiB. This page is made from the models that check it
(`python -m workers.spec.reference`). A field that does not stand here is an error, with the nearest name as a
suggestion; a value of the wrong type is one too, since no text is read as a number. The shortest useful spec:

```yaml
name: gpt-on-stdlib
model: {kind: gpt}
data: {kind: text}
train:
  steps: 300
```

"""

_TAIL = """\
## What goes together

- `train.global_batch` is a multiple of `train.micro_batch`; their quotient V is the number of micro-batches of a step.
  `resources.ranks` is at most V. V need not be a multiple of the ranks: the plan then shows the idle share.
- `train.chunk` (C) is the number of micro-batches summed before they travel. V and C fix the bits of a run, the number
  of ranks and the stage do not. `auto` divides V by the ranks of the spec as submitted, rounded up, and is then kept
  by every resume.
- Model `gpt` reads data `text` and `tokens`, model `mlp` reads `digits`, model `python` reads all of them.
- `shardyard run`, `plan` and `submit` take relative paths from the folder of the spec file. The HTTP API refuses them,
  and reads only below the server's `data_roots`.
- A model of kind `python` is called as `forward(inputs) -> logits`, or as `forward(inputs, targets) -> loss` where it
  takes targets. Sequences have `kwargs.context` tokens, 256 where that is not given. The module must lie in
  `model.path`, and no package there may be called `server`, `workers` or `zero_engine`.
- Text is split by document: whole files in the order of their hashes are held out until they hold 5 % of the bytes. A
  single file is cut at a line end, its last 5 % held out. When the validation part is shorter than one context,
  evaluation is off and an event says so.
- A token file `train.bin` holds little-endian ids; `train.bin.json` beside it says how to read them:
  `{"dtype": "uint16", "vocabulary": 50257}`.

- With `precision: fp16` the loss is scaled and the scale adapts. A step whose loss or gradient is not finite is skipped
  at every precision: weights and moments stay, an event says so, and the learning rate does not advance.
- With `zero.offload: optimizer` master weights and moments stand in host memory (pinned where the device is a GPU) and
  the update runs there: a GPU holds fewer bytes, a step takes longer. On a CPU the bits are those of a run without it.
"""


def reference() -> str:
    """The whole page, Markdown."""
    return _HEAD + "\n".join(_section("Top level", JobSpec, "")) + "\n" + _TAIL


def _section(title: str, model: type[BaseModel], prefix: str) -> Iterator[str]:
    yield f"## {title}\n"
    if model.__doc__ and prefix:
        yield f"{' '.join(model.__doc__.split())}\n"
    yield "| field | type | default | |"
    yield "|---|---|---|---|"
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        models = [arm for arm in arms_of(field.annotation) if isinstance(arm, type) and issubclass(arm, BaseModel)]
        inner += [(f"{prefix}{name}", arm) for arm in models]
        yield f"| `{name}` | {_type(field)} | {_default(field)} | {field.description or ''} |"
    yield ""
    for path, arm in inner:
        kind = _kind(arm)
        yield from _section(f"{path}: {kind}" if kind else path, arm, f"{path}.")


def _type(field: FieldInfo) -> str:
    arms = arms_of(field.annotation)
    models = [arm for arm in arms if isinstance(arm, type) and issubclass(arm, BaseModel)]
    if models:
        kinds = [f"`{_kind(arm)}`" for arm in models if _kind(arm)]
        return "kind: " + " or ".join(kinds) if kinds else "fields"
    words = [_word(arm) for arm in arms if arm is not type(None)]
    return " or ".join(words) + _bounds(field)


def _word(annotation: Any) -> str:
    if typing.get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(annotation))
    if typing.get_origin(annotation) is list:
        return "list of " + _word(arms_of(typing.get_args(annotation)[0])[0]).replace("number", "numbers")
    if typing.get_origin(annotation) is dict:
        return "fields"
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}[annotation]


def _bounds(field: FieldInfo) -> str:
    """Limits that a person may meet; the others are far away."""
    found = {
        name: getattr(each, name) for each in field.metadata for name in ("ge", "gt", "lt", "le") if hasattr(each, name)
    }
    low = (
        f" from {_number(found['ge'])}" if "ge" in found else f" above {_number(found['gt'])}" if "gt" in found else ""
    )
    high = f" below {_number(found['lt'])}" if "lt" in found else f" to {_number(found['le'])}" if "le" in found else ""
    return low + high


def _number(value: float) -> str:
    if isinstance(value, int) and value >= 1 << 20 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    if isinstance(value, int) and value + 1 >= 1 << 20 and value & (value + 1) == 0:
        return f"2^{value.bit_length()}-1"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return ""
    value = field.default.model_dump(mode="json") if isinstance(field.default, BaseModel) else field.default
    if isinstance(value, dict):
        return f"`kind: {value['kind']}`" if "kind" in value else "below"
    return f"`{json.dumps(value)}`".replace('"', "")


def _kind(model: type[BaseModel]) -> str:
    field = model.model_fields.get("kind")
    return str(typing.get_args(field.annotation)[0]) if field else ""


if __name__ == "__main__":
    print(reference(), end="")
