"""A job's spec changed for a fork or a clone, and whether a checkpoint of the old one fits it. Pure; no torch.

What a checkpoint holds is the layout: names, shapes, units and optimizer groups of the parameters, with the optimizer's
moments. Both specs give theirs without building anything, so a fork that cannot load is refused before it is queued.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.errors import ApiError, invalid
from workers.planner import NeedsModel, parameters_of
from workers.spec import JobSpec, parse_spec
from zero_engine.layout import Layout, ParameterSpec

Json = Mapping[str, Any]


def merged(data: Json, patch: Json) -> dict[str, Any]:
    """`data` with a JSON merge patch applied (RFC 7396): null removes a field, so that its default counts again."""
    result = dict(data)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            before = result.get(name)
            result[name] = merged(before if isinstance(before, dict) else {}, value)
        else:
            result[name] = value
    return result


def changed_spec(spec: Json, chunk: int, patch: Json) -> JobSpec:
    """A job's spec with a merge patch; the chunk keeps its number unless the patch has one. Raises SpecError."""
    kept = {**spec, "train": {**spec["train"], "chunk": chunk}}
    return parse_spec(merged(kept, patch))


def check_fits(new: JobSpec, old: JobSpec, step: int) -> None:
    """Raises ApiError 422 by field when a checkpoint of `old` at `step` cannot begin a job with `new`."""
    if new.train.steps <= step:
        raise invalid("/train/steps", f"the checkpoint is at step {step}; ask for more steps", value=new.train.steps)
    wanted, kept = new.train.optimizer, old.train.optimizer
    if wanted.kind != kept.kind:
        message = f"the checkpoint holds the moments of {kept.kind}"
        raise invalid("/train/optimizer/kind", message, value=wanted.kind, suggestion=kept.kind)
    if wanted.moments != kept.moments:
        message = "the checkpoint was made " + ("with momentum; keep some" if kept.moments else "without momentum")
        raise invalid("/train/optimizer/momentum", message, value=getattr(wanted, "momentum", None))
    if _tokens(new) != _tokens(old):
        raise invalid("/data", "the checkpoint was trained on other tokens; keep the kind of data and its tokenizer")
    try:
        difference = _difference(_layout(new), _layout(old))
    except NeedsModel:
        difference = None if new.model == old.model else "a user's model cannot be compared before it is built; keep it"
    if difference is not None:
        raise invalid("/model", difference)


def refused(step: int, status: str) -> ApiError:
    """409 for a checkpoint that nothing can begin from."""
    return ApiError(409, f"The checkpoint of step {step} is {status}.", code="checkpoint_unusable")


def _tokens(spec: JobSpec) -> dict[str, Any]:
    """What turns data into a model's inputs; the content itself is compared by its hash when the fork starts."""
    return spec.data.model_dump(exclude={"path", "validation"})


def _layout(spec: JobSpec) -> dict[str, ParameterSpec]:
    """The parameters by name, in their order."""
    return {entry.spec.name: entry.spec for entry in Layout.build(parameters_of(spec)).canonical_entries}


def _difference(new: Mapping[str, ParameterSpec], old: Mapping[str, ParameterSpec]) -> str | None:
    for name in dict.fromkeys((*old, *new)):
        if name not in new or name not in old:
            return f"parameter {name!r} is only in the {'checkpoint' if name in old else 'changed model'}"
        if new[name].shape != old[name].shape:
            return (
                f"parameter {name!r} is {list(old[name].shape)} in the checkpoint, {list(new[name].shape)} as changed"
            )
        if new[name] != old[name]:
            return f"parameter {name!r} is tied, grouped or trained otherwise in the checkpoint"
    return None
