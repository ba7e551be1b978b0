"""`docs/engine_api.md`: every public name of `zero_engine`, from its signatures, docstrings and comments.

What the source says in no comment of a field stands in FIELDS and ATTRIBUTES; `tests/unit/test_engine_reference.py`
holds both to the engine.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

FIELDS = {  # of ZeroConfig: beside the comment, or in its place
    "stage": "0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters",
    "micro_batches": "`None`: one for each rank",
    "chunk": "`None`: V / ranks, rounded up",
    "seed": "of first values on the meta device, and with step and micro-batch of dropout",
    "gradient_clipping": "any finite number of at least 0",
    "transport": "auto is shared memory between CPU ranks of one machine, else the process group",
    "bucket_bytes": "at least 4096",
}
ATTRIBUTES = {  # of an engine
    "module": "the model, on its device, with the engine's hooks in it: call this one",
    "config": "the `ZeroConfig` with V and C as numbers",
    "optimizer": "the one given, `AdamW()` where none was",
    "layout": "the `Layout`: where every element of every parameter lives",
    "parameters": "the model's parameters in canonical order",
    "rank": "this rank's place in the group",
    "ranks": "how many there are",
    "device": "where this rank trains",
    "completed_steps": "applied or skipped; a resume sets it",
    "loss_scale": "the `LossScale` of the next step; 1 and constant but for fp16",
    "loaded": "the `Loaded` of the checkpoint that it was restored from, else `None`",
    "comm": "the transport; for tests and for those who change the engine",
    "master": "masters and moments of this rank; likewise",
}
_HEAD = """\
# The engine's API

Everything public of `zero_engine`; how it works stands in [engine.md](engine.md), how to come to it in
[from DDP](from_ddp.md), [from FSDP](from_fsdp.md) and [from DeepSpeed](from_deepspeed.md). A collective call is made by
every rank, between the same steps.

| name | from |
|---|---|
| NAMES | `zero_engine` |
| `Saver`, `SaveReport` | `zero_engine.saver` |
| `Loaded`, `Refused` | `zero_engine.checkpoint` |
| `Manifest`, `Progress`, `CheckpointError` | `zero_engine.manifest` |
| `Plan`, `LedgerReport` | `zero_engine.plan`, `zero_engine.comm` |
| `Place` | a folder, as text or path, or a `zero_engine.store.Store` |
| `Initial` | a function of (name, tensor) that writes the first values of a parameter or buffer into the tensor |
| `LossOf` | a function of (module, step, micro-batch) that gives the loss, a tensor of one number |
| `Optimizer` | one of this page, or what has their `moments`, `groups_of` and `updates` (`zero_engine.adamw`) |
| `Policy` | `"wait"` or `"skip"`: what `saver.save` does while the save before still runs |

```python
engine = Engine(model, ZeroConfig(stage=2, micro_batches=8, chunk=2), optimizer=EMA(AdamW(lr=1e-3), decay=0.999))
saver = engine.saver("checkpoints")
for step in range(engine.completed_steps, 1000):
    for index in engine.micro_batches():
        inputs, targets = data.micro_batch(step, index)
        engine.backward(loss_of(engine.module(inputs), targets))
    result = engine.step(lr=schedule(step))
    if engine.completed_steps % 100 == 0:
        saver.save(engine.completed_steps)
average = engine.full_state_dict(kind="ema")  # by name, whole, on every rank's host
engine.close()
```
"""
_AVERAGE = """\
The average is sharded, saved, restored and counted in the plan as a moment is. Any other name in `optimizer.moments`,
such as "exp_avg", gives that state instead.
"""


def engine_page() -> str:
    """The whole page, Markdown."""
    import zero_engine
    from zero_engine.catalog import Verification
    from zero_engine.checkpoint import Loaded, Refused
    from zero_engine.comm import LedgerReport
    from zero_engine.manifest import Manifest, Progress
    from zero_engine.plan import Plan
    from zero_engine.saver import Saver, SaveReport

    engine = zero_engine.Engine
    optimizers = [getattr(zero_engine, name) for name in ("AdamW", "Adam", "SGD", "Lion", "ElementWise", "EMA")]
    functions = [getattr(zero_engine, name) for name in ("builds_here", "initialise", "plan_of", "digest_of")]
    parts = [
        _HEAD.replace("NAMES", ", ".join(f"`{name}`" for name in zero_engine.__all__)),
        *_config(zero_engine.ZeroConfig),
        *_class("Engine", engine),
        *_attributes(),
        *_members(engine, "###", "engine."),
        *_record(zero_engine.StepResult, "Of `engine.step`."),
        *_record(Plan, "Of `engine.plan` and `plan_of`.", with_members=True),
        *_record(LedgerReport, "Of `engine.ledger`.", with_members=True),
        "## Optimizers\n",
        *(line for kind in optimizers for line in _class(kind.__name__, kind, "###")),
        _AVERAGE,
        "## Saver\n",
        f"Of `engine.saver`, which makes it. {_doc(Saver)}\n",
        *_members(Saver, "###", "saver."),
        *_record(SaveReport, "Of `saver.poll` and `saver.finish`."),
        *_record(Progress, "For `engine.save` and `saver.save`."),
        *_record(Manifest, "What `engine.save` gives, in `SaveReport` and `Loaded`."),
        *_record(Loaded, "Of `engine.restore`, and `engine.loaded`."),
        *_record(Refused, "In `Loaded.refused`."),
        "## Functions\n",
        *(line for function in functions for line in _function(function, "###", "")),
        *_record(zero_engine.ParameterSpec, "What a layout is built from, without a model.", with_members=True),
        *_class("Layout", zero_engine.Layout),
        *_members(zero_engine.Layout, "###", "layout."),
        *_record(Verification, "Of `zero_engine.catalog.verify(store, folder)`.", with_members=True),
        *_errors(),
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def _config(config: type) -> Iterator[str]:
    yield "## ZeroConfig\n"
    yield f"{_doc(config)}\n"
    yield "A value that cannot work is a `ConfigError` that names the field and what to use.\n"
    yield from _field_table(config, FIELDS)
    yield from _members(config, "###", "config.")


def _class(name: str, kind: type, level: str = "##") -> Iterator[str]:
    yield f"{level} {name}\n"
    yield f"```python\n{name}{_parameters(kind.__init__, skip=1, returns=False)}\n```\n"
    yield "\n\n".join(text for text in (_doc(kind), _doc(kind.__init__)) if text) + "\n"


def _attributes() -> Iterator[str]:
    yield "| attribute | |\n|---|---|"
    for name, text in ATTRIBUTES.items():
        yield f"| `engine.{name}` | {text} |"
    yield ""


def _members(kind: type, level: str, prefix: str) -> Iterator[str]:
    """Public properties as a table, then public methods, in the order of the source."""
    own = [(name, value) for part in kind.__mro__ for name, value in vars(part).items() if part is not object]
    public = {name: value for name, value in reversed(own) if not name.startswith("_")}
    properties = {name: value for name, value in public.items() if hasattr(value, "__get__") and _getter(value)}
    if properties:
        yield f"| property of `{kind.__name__}` | |\n|---|---|"
        for name in sorted(properties, key=lambda each: _line(_getter(properties[each]))):
            yield f"| `{prefix}{name}` | {_cell(_doc(_getter(properties[name])))} |"
        yield ""
    methods = [value for value in public.values() if inspect.isfunction(_plain(value))]
    for method in sorted(methods, key=lambda each: (_plain(each).__module__ != kind.__module__, _line(_plain(each)))):
        yield from _function(method, level, f"{kind.__name__}." if _plain(method) is not method else prefix)


def _function(function: Any, level: str, prefix: str) -> Iterator[str]:
    plain = _plain(function)
    takes_self = plain.__qualname__ != plain.__name__ and not isinstance(function, staticmethod)
    yield f"{level} {prefix}{plain.__name__}\n"
    yield f"```python\n{prefix}{plain.__name__}{_parameters(plain, skip=int(takes_self))}\n```\n"
    yield f"{_doc(plain)}\n"


def _record(kind: type, said: str, *, with_members: bool = False) -> Iterator[str]:
    yield f"## {kind.__name__}\n"
    yield f"{said} {_doc(kind)}\n"
    yield from _field_table(kind, {})
    if with_members:
        yield from _members(kind, "###", "")


def _field_table(kind: type, more: dict[str, str]) -> Iterator[str]:
    assert is_dataclass(kind), kind
    source = inspect.getsource(kind)
    comments = dict(re.findall(r"^    (\w+): [^\n]*?  # (.+)$", source, re.MULTILINE))
    yield "| field | type | default | |\n|---|---|---|---|"
    for field in fields(kind):
        text = "; ".join(each for each in (comments.get(field.name, ""), more.get(field.name, "")) if each)
        yield f"| `{field.name}` | `{_cell(str(field.type))}` | {_default(field)} | {_cell(text)} |"
    yield ""


def _errors() -> Iterator[str]:
    from zero_engine import errors

    yield "## Errors\n"
    yield "Each is an `EngineError` with a stable `code`, in `zero_engine.errors`.\n"
    yield "| error | code | |\n|---|---|---|"
    for name, kind in vars(errors).items():
        if inspect.isclass(kind):
            yield f"| `{name}` | `{kind.code}` | {_cell(_doc(kind))} |"
    yield ""


def _parameters(function: Any, skip: int, returns: bool = True) -> str:
    """A signature as it is written, one line or one a parameter."""
    signature = inspect.signature(function)
    kept = list(signature.parameters.values())[skip:]
    texts = [_parameter(each) for each in kept]
    if any(each.kind is each.KEYWORD_ONLY for each in kept):
        texts.insert(next(i for i, each in enumerate(kept) if each.kind is each.KEYWORD_ONLY), "*")
    given = signature.return_annotation
    end = f" -> {given}" if returns and given not in (inspect.Signature.empty, "None") else ""
    line = f"({', '.join(texts)}){end}"
    return line if len(line) < 96 else "(\n" + "".join(f"    {text},\n" for text in texts) + f"){end}"


def _parameter(parameter: inspect.Parameter) -> str:
    name, annotation = parameter.name, parameter.annotation
    typed = name if annotation is parameter.empty else f"{name}: {annotation}"
    return typed if parameter.default is parameter.empty else f"{typed} = {parameter.default!r}"


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return f"`{field.default!r}`"
    return "required" if field.default_factory is MISSING else f"`{field.default_factory()!r}`"


def _doc(thing: Any) -> str:
    """A docstring of its own; its paragraphs each on one line."""
    text = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _plain(value: Any) -> Any:
    return value.__func__ if isinstance(value, classmethod | staticmethod) else value


def _getter(value: Any) -> Any:
    return getattr(value, "fget", None) or (getattr(value, "func", None) if hasattr(value, "attrname") else None)


def _line(function: Any) -> int:
    return int(function.__code__.co_firstlineno)
