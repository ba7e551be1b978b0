"""The plan of a user's model: `python -m workers.model_plan`, a process of its own, since their code runs in it.

Standard input: {"spec": {...}, "ranks": [1, 2, ...], "where": {...}}. Standard output: a list of plans, one for each
number of ranks. What the user's code prints goes to standard error; exit code 1 with the reason there when the model
cannot be built.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import torch
from torch import nn

from workers.build import optimizer_of
from workers.failures import error_info
from workers.models.python import build_user_model
from workers.planner import SpecPlan, Where, plan_parameters
from workers.spec import JobSpec, PythonModel, parse_spec
from zero_engine.flat import layout_of
from zero_engine.layout import ParameterSpec


def plans_of(question: dict[str, Any]) -> list[SpecPlan]:
    """The plans asked for. Raises EntryError, SpecError and whatever the user's code raises."""
    spec = parse_spec(question["spec"])
    where = Where.model_validate(question["where"])
    parameters = parameters_of_user_model(spec)
    return [plan_parameters(parameters, spec, where, ranks) for ranks in question["ranks"]]


def parameters_of_user_model(spec: JobSpec) -> list[ParameterSpec]:
    """Names, shapes, units and groups as the engine will find them."""
    assert isinstance(spec.model, PythonModel), spec.model.kind
    layout = layout_of(_built(spec.model, spec.train.seed), (), optimizer_of(spec.train.optimizer))
    return [entry.spec for entry in layout.canonical_entries]


def _built(model: PythonModel, seed: int) -> nn.Module:
    """On the meta device, where weights take no memory; on the CPU for code that needs values."""
    try:
        with torch.device("meta"):
            return build_user_model(model, seed)
    except (NotImplementedError, RuntimeError):
        return build_user_model(model, seed)


def main() -> int:
    """Answer one question; returns the exit code."""
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        plans = plans_of(json.load(sys.stdin))
    except Exception as error:
        info = error_info(error)
        traceback.print_exc() if info.code is None else print(info.message, file=sys.stderr)
        return 1
    with os.fdopen(answers, "w") as file:
        json.dump([plan.model_dump(mode="json") for plan in plans], file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
