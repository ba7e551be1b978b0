"""The plan of a user's model as another process makes it (`workers/model_plan.py`): their code never runs in this one.

Torch-free. Here too: how `zero.stage: auto` becomes a number, for which such a model has to be built.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.kill_pipe import open_kill_pipe
from workers.planner import NeedsModel, SpecPlan, Where, plan_spec
from workers.spec import JobSpec

BUILD_SECONDS = 120.0
SAID_BYTES = 4000  # kept of what the user's code printed, from its end
ANSWER_BYTES = 1 << 26
STAGE_OF_UNKNOWN_MODEL = 1  # stage 0's traffic at any number of micro-batches, with fewer bytes
COMMAND = ("nice", "-n", "10", sys.executable, "-P", "-m", "workers.model_plan")  # ranks that start or train go first


class NotBuilt(Exception):
    """The model could not be built or measured; the text is what its process said."""


@dataclass(frozen=True)
class Resolved:
    """A spec whose stage is a number."""

    spec: JobSpec
    plan: SpecPlan | None = None  # that the stage was taken from
    why: str | None = None  # the sentence that says why; None where the spec itself names the stage


async def plan_of(spec: JobSpec, where: Where) -> SpecPlan:
    """The plan of any spec. Raises NotBuilt for a user's model that cannot be, DataError for data without its facts."""
    try:
        return await asyncio.to_thread(plan_spec, spec, where)
    except NeedsModel:
        return (await plans_of_built(spec, [spec.resources.ranks], where))[0]


async def plans_of_built(
    spec: JobSpec, ranks: Sequence[int], where: Where, seconds: float | None = None
) -> list[SpecPlan]:
    """A plan for each number of ranks, within `seconds` (BUILD_SECONDS). Raises NotBuilt.

    What was started ends with this call, also when it is cancelled, and with the process that made it.
    """
    lifeline, bound = open_kill_pipe(), BUILD_SECONDS if seconds is None else seconds
    question = {
        "spec": spec.model_dump(mode="json"),
        "ranks": list(ranks),
        "where": where.model_dump(mode="json"),
        "lifeline": lifeline.reader,
    }
    try:
        async with asyncio.timeout(bound):
            answer = await _ask(json.dumps(question).encode(), lifeline.reader)
    except TimeoutError as error:
        raise NotBuilt(f"It was not built within {bound:g} s.") from error
    finally:
        os.close(lifeline.reader)
        os.close(lifeline.writer)
    if isinstance(answer, str):
        raise NotBuilt(_text(answer.encode(errors="replace")))
    return [SpecPlan.model_validate(plan) for plan in answer]


async def _ask(question: bytes, lifeline: int) -> list[dict[str, Any]] | str:
    """What the process answers: the plans, or why there are none. Raises NotBuilt when it ends without a word."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=ANSWER_BYTES, pass_fds=(lifeline,), start_new_session=True
    )
    assert process.stdin and process.stdout and process.stderr
    said = asyncio.create_task(_end_of(process.stderr))
    try:
        process.stdin.write(question)
        process.stdin.close()
        answer = await process.stdout.readline()
    finally:
        await _end(process)
    if not answer.endswith(b"\n"):
        raise NotBuilt(f"{_text(await said)}\nIts process {_how(process.returncode or 0)}.".strip())
    found: list[dict[str, Any]] | str = json.loads(answer)
    return found


async def _end_of(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while more := await stream.read(1 << 16):
        kept = (kept + more)[-SAID_BYTES:]
    return kept


async def _end(process: Process) -> None:
    """It leads its group: what the user's code has started goes with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _text(said: bytes) -> str:
    """What every database can hold."""
    return said.decode(errors="replace").replace("\0", "")


def _how(code: int) -> str:
    return f"ended with code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


def resolve_stage(spec: JobSpec, where: Where) -> Resolved:
    """`auto` takes the least traffic that fits, then the fewest bytes. Raises DataError for data without its facts.

    A user's model is built for that, without memory; one that cannot be gets a stage that never sends more than
    another, and its ranks will say what is wrong with it.
    """
    if spec.zero.stage != "auto":
        return Resolved(spec)
    try:
        plan = asyncio.run(plan_of(spec, where))
        return Resolved(at_stage(spec, plan.advised_stage), plan, plan.advice)
    except NotBuilt as error:
        stage, last = STAGE_OF_UNKNOWN_MODEL, str(error).splitlines()[-1][:200]
        why = f"Stage {stage}, which never sends more than another: the model could not be planned ({last})."
        return Resolved(at_stage(spec, stage), None, why)


def at_stage(spec: JobSpec, stage: int) -> JobSpec:
    """The spec with this stage."""
    return spec.model_copy(update={"zero": spec.zero.model_copy(update={"stage": stage})})
