"""One rank's life: join, build, restore, train, end; every word of it in its spool.

`main` is what a fork of the zygote runs, and what `workers.local` runs in its children: there is one path.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import torch._dynamo  # noqa: F401  torch would load it at the first step, a second of every rank's own
import torch.distributed as dist

from workers.build import Loss, build_model, loss_of, moved, optimizer_of, prepare_device, start_of
from workers.contract import DISK_EXIT, LaunchOrder, PlanRecord, ResultRecord
from workers.data.batches import Data
from workers.data.errors import DataError
from workers.data.opening import open_data
from workers.failures import error_info
from workers.joining import device_of, join_group
from workers.measuring import peak_resident_bytes
from workers.models.python import EntryError
from workers.planner import engine_config
from workers.reporter import Reporter
from workers.restoring import Progressed, restore
from workers.saving import saving_of
from workers.training import Training
from zero_engine import Engine, builds_here

FAILED_EXIT = 1
SENTENCES = (DataError, EntryError)  # say what to change in the spec: no traceback would help


def main(order: LaunchOrder, listen_fd: int | None) -> int:
    """Live from the order to the result file; returns the exit code. `listen_fd`: rank 0's listening socket."""
    reporter = Reporter(Path(order.rank_folder))
    reporter.phase("started")
    try:
        with reporter.alive():
            result = _live(order, listen_fd, reporter)
    except BaseException as error:  # also SystemExit and KeyboardInterrupt of the user's code
        if isinstance(error, SENTENCES):
            print(error, file=sys.stderr)
        else:
            traceback.print_exc()
        result = _failed(reporter, error)
    try:
        reporter.result(result)
    except OSError:  # a full disk: the exit code alone says so
        traceback.print_exc()
        return DISK_EXIT
    reporter.close()
    return 0 if result.error is None else FAILED_EXIT


def _live(order: LaunchOrder, listen_fd: int | None, reporter: Reporter) -> ResultRecord:
    device = device_of(order)
    prepare_device(order.spec, device)
    reporter.phase("preparing")
    data = open_data(order.spec, Path(order.cache_folder), lambda message: reporter.event("data.preparing", message))
    reporter.phase("joining")
    join_group(order, listen_fd)
    reporter.phase("building")
    engine = build_engine(order, data)
    try:
        result = _train(order, engine, data, reporter)
    except BaseException as error:
        engine.close(f"{type(error).__name__}: {error_info(error).message}")  # str(error) may itself raise
        raise
    engine.close()
    dist.destroy_process_group()
    return result


def build_engine(order: LaunchOrder, data: Data) -> Engine:
    """The model under the engine that the order names; it goes to its device in shards."""
    spec = order.spec
    stage = spec.zero.stage
    assert stage != "auto", "the stage of an order is a number"
    start = start_of(spec, data, builds_here)
    config, optimizer = engine_config(spec, order.chunk, stage), optimizer_of(spec.train.optimizer)
    return Engine(start.model, config, optimizer, device=device_of(order), initial=start.initial)


def _train(order: LaunchOrder, engine: Engine, data: Data, reporter: Reporter) -> ResultRecord:
    loss = loss_of(engine.module)
    progressed = Progressed()
    if order.resume is not None:
        reporter.phase("restoring")
        progressed = restore(order, order.resume, engine, data, reporter)
    elif order.spec.zero.self_test:
        _test_engine(order, engine, data, loss)
        reporter.event("engine.tested", "two steps of this model were equal to the plain loop, bit for bit")
    reporter.step = progressed.completed
    if order.rank == 0:
        reporter.add(_plan_record(engine, order.chunk, reporter))
    reporter.phase("training")
    saving = saving_of(order, engine, data, reporter)
    outcome = Training(order, engine, data, loss, reporter, saving).run(progressed)
    digest = engine.digest()
    reporter.phase("finished")
    return ResultRecord(
        at=reporter.time(), outcome=outcome, step=reporter.step, digest=digest, peak_rss=peak_resident_bytes()
    )


def _test_engine(order: LaunchOrder, engine: Engine, data: Data, loss: Loss) -> None:
    """Raises DivergedError when the engine and the plain loop disagree about this model."""
    engine.self_test(
        lambda: build_model(order.spec, data).to(engine.device),
        lambda module, step, index: loss(module, moved(data.micro_batch(step, index), engine.device)),
    )


def _plan_record(engine: Engine, chunk: int, reporter: Reporter) -> PlanRecord:
    plan = engine.plan
    return PlanRecord(
        at=reporter.time(),
        memory=[dict(row) for row in plan.memory],
        traffic=[dict(row) for row in plan.traffic],
        parameters=plan.num_parameters,
        stage=plan.stage,
        chunk=chunk,
    )


def _failed(reporter: Reporter, error: BaseException) -> ResultRecord:
    return ResultRecord(
        at=reporter.time(),
        outcome="failed",
        step=reporter.step,
        error=error_info(error),
        exit_code=FAILED_EXIT,
        peak_rss=peak_resident_bytes(),
    )
