"""What a run may change when it goes on from its own checkpoint: what never changes a bit. Pure, and torch-free.

The rules are those of `POST /v1/jobs/{id}/resume` (ranks, the zero section, more steps), with what only says how often
something is looked at or kept, and where files lie: their content is compared when the state is loaded. Any other
change makes another run, which a fork or a new one is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from workers.spec import JobSpec
from workers.spec.problems import shown
from zero_engine.manifest import Manifest

FREE = (
    "name",
    "tags",
    "priority",
    "restart",
    "stop_grace_seconds",
    "checkpoint",
    "zero",
    "resources.ranks",
    "resources.device",
    "train.steps",
    "train.eval",
    "train.chunk",  # the checkpoint's is kept
    "model.path",
    "model.start",
    "data.path",
    "data.validation",
    "data.tokenizer.path",
)

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """A field that a resume would change."""

    field: str  # "train.seed"
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.field} is {shown(self.now)}, and the run that saved had {shown(self.then)}"


def changes_between(then: JobSpec, now: JobSpec) -> list[Change]:
    """Fields that only another run can have, in the order of the spec."""
    return _changes(then.model_dump(mode="json"), now.model_dump(mode="json"))


def changes_from(manifest: Manifest, spec: JobSpec) -> list[Change]:
    """As far as a checkpoint alone tells: seed, precision, micro-batches of a step, the schedule."""
    saved, train = manifest.arithmetic, spec.train
    schedule = {name: value for name, value in manifest.progress.schedule.items() if name != "steps"}
    found = [
        Change("train.seed", saved.seed, train.seed),
        Change("train.precision", saved.precision, train.precision),
        Change("train.global_batch / train.micro_batch", saved.micro_batches, train.micro_batches),
        *_changes({"train": {"schedule": schedule}}, {"train": {"schedule": train.schedule.model_dump(mode="json")}}),
    ]
    return [change for change in found if change.then != change.now]


def _changes(then: Json, now: Json) -> list[Change]:
    before, after = dict(_leaves(then)), dict(_leaves(now))
    names = [name for name in dict.fromkeys((*before, *after)) if not _is_free(name)]
    found = [Change(name, before.get(name), after.get(name)) for name in names]
    return [change for change in found if change.then != change.now]


def _is_free(name: str) -> bool:
    return any(name == free or name.startswith(f"{free}.") for free in FREE)


def _leaves(value: Json, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, inner
