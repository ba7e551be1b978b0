"""The plan of a user's model, made in a process of its own, since their code runs in it (`workers/model_builder.py`).

The question: {"spec": {...}, "ranks": [1, 2, ...], "where": {...}, "folder": working directory}. The answer: a list of
plans, one for each number of ranks, or a text that says why the model cannot be built.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import nn

from workers.build import loss_of, optimizer_of
from workers.data.batches import Batch
from workers.data.digits import INPUTS
from workers.data.needs import context_of
from workers.estimates import FROM_PASS, Estimate
from workers.failures import error_info
from workers.model_builder import ANSWER_FILE, SAID_BYTES
from workers.models.python import EntryError, build_user_model, user_model_on_meta
from workers.planner import SpecPlan, Where, engine_config, plan_parameters
from workers.rank_process import write_atomically
from workers.spec import JobSpec, PythonModel, parse_spec
from zero_engine.dry_run import Empty, dry_run
from zero_engine.flat import layout_of
from zero_engine.layout import ParameterSpec


def plans_of(question: dict[str, Any]) -> list[SpecPlan]:
    """The plans asked for. Raises EntryError, SpecError and whatever the user's code raises."""
    spec = parse_spec(question["spec"])
    where = Where.model_validate(question["where"])
    model = user_model(spec)
    parameters, estimate = parameters_in(model, spec), estimate_in(model, spec)
    return [plan_parameters(parameters, spec, where, ranks, estimate) for ranks in question["ranks"]]


def user_model(spec: JobSpec) -> nn.Module:
    """The spec's model, without memory where it can be."""
    assert isinstance(spec.model, PythonModel), spec.model.kind
    model = user_model_on_meta(spec.model, spec.train.seed)
    return build_user_model(spec.model, spec.train.seed) if model is None else model


def parameters_in(model: nn.Module, spec: JobSpec) -> list[ParameterSpec]:
    """Names, shapes, units and groups as the engine will find them."""
    layout = layout_of(model, (), optimizer_of(spec.train.optimizer))
    return [entry.spec for entry in layout.canonical_entries]


def estimate_in(model: nn.Module, spec: JobSpec) -> Estimate:
    """What a micro-batch holds and computes, by passing tensors without contents through the model and its loss.

    Raises EntryError for a model that returns no logits and no loss.
    """
    samples, loss = spec.train.micro_batch, loss_of(model)
    if spec.data.kind == "digits":
        batch = (Empty((samples, INPUTS), torch.float32), Empty((samples,), torch.int64))
    else:
        batch = (Empty((samples, context_of(spec)), torch.int64),) * 2
    try:
        found = dry_run(model, lambda module, x, y: loss(module, Batch(x, y)), batch, engine_config(spec, spec.chunk))
    except EntryError:
        raise
    except Exception as error:  # their code, on tensors whose values cannot be read: a plan without this part
        return Estimate(None, None, f"the model cannot be passed through without values ({type(error).__name__})")
    return Estimate(found.peak_bytes, found.flops, FROM_PASS, found.attention_flops)


def answer_to(question: dict[str, Any]) -> list[dict[str, Any]] | str:
    """The plans asked for, or the user's mistake, or the end of the traceback of their code."""
    try:
        return [plan.model_dump(mode="json") for plan in plans_of(question)]
    except Exception as error:
        info = error_info(error)
        return traceback.format_exc()[-SAID_BYTES:] if info.code is None else info.message


def answer(question_file: str, _: int | None) -> None:
    """What a fork of the builder's zygote runs: answer one question, in the folder that it was asked from."""
    with contextlib.suppress(OSError):  # where memory gets short, this is the first to go, if the system lets it
        Path("/proc/self/oom_score_adj").write_text("1000")
    question = json.loads(Path(question_file).read_text())
    os.chdir(question["folder"])
    write_atomically(Path(question_file).with_name(ANSWER_FILE), json.dumps(answer_to(question)))
