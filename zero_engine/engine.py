"""The public face: one object that trains a module at any ZeRO stage with the same bits.

engine = Engine(model, ZeroConfig(stage=2, micro_batches=8, chunk=2), optimizer=AdamW(lr=1e-3))
for step in range(steps):
    for index in engine.micro_batches():
        engine.backward(loss_of(engine.module(inputs[index]), targets[index]))
    result = engine.step()
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import Timer
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_engine.adamw import Optimizer, learning_rates, shardable
from zero_engine.agree import Agreement
from zero_engine.assembly import Assembly
from zero_engine.beginning import begin, place_of
from zero_engine.blame import blame
from zero_engine.clip import clip_factor, norm_of
from zero_engine.comm import LedgerReport
from zero_engine.config import ZeroConfig
from zero_engine.errors import DivergedError, EngineError, NonFiniteError, PeerError, UsageError
from zero_engine.first_values import Built, FirstValues, Initial
from zero_engine.flat import layout_of
from zero_engine.fold import Task
from zero_engine.group import Membership, comm_between, membership_of, refusals_told, require_equal_settings
from zero_engine.hooks import require_unwatched
from zero_engine.last_words import LastWords
from zero_engine.layout import Layout
from zero_engine.loss_scale import loss_scale_of
from zero_engine.mail import FLAGS, Outcome, mark_of, mean_loss
from zero_engine.memory_meter import meter_of
from zero_engine.persistent import Persistent
from zero_engine.plan import Plan, plan_from
from zero_engine.step_result import ACTIVATIONS, StepResult
from zero_engine.supported import require_loss, require_no_gradients, require_open_units, require_supported
from zero_engine.tally import Tally
from zero_engine.trace import write_trace

if TYPE_CHECKING:  # checkpoint files load xxhash, which a plain training run can do without
    from zero_engine.checkpoint import Place
    from zero_engine.refit import Belongings
    from zero_engine.self_test import LossOf


FAREWELL_SECONDS = 1.0  # between leaving a loop over micro-batches and the end of the waiting ranks


class Engine(Persistent):
    """Trains `model` over the ranks of `group` (None: the default group, or this process alone)."""

    def __init__(
        self,
        model: nn.Module,
        config: ZeroConfig,
        optimizer: Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        initial: Initial | None = None,
    ) -> None:
        """`device`: where to train; None: where the model stands. A `model` on the meta device starts unit by unit
        from what a rank with a built one sends, from `initial(name, tensor)`, which writes the first values of one
        parameter or buffer, or from its modules' `reset_parameters` (as `initialise(model, config.seed)` does).
        """
        member = membership_of(group)
        with refusals_told(member):
            self._take(model, config, optimizer, member, device)
        require_equal_settings(member, self.config, self.optimizer)
        self.comm = comm_between(member, self.device, self.config)
        with self.comm.ledger.on("construction"):
            first = begin(self.comm, member, self.layout, model, self.parameters, self.config, self.device, initial)
            self._assemble(first)
            first.finish()
            self._agreement = Agreement(self.comm, self.device)
        self.comm.ledger.page = "evaluation"
        self.completed_steps = 0  # steps applied or skipped
        self._broken = ""  # why the engine stopped inside a step
        self._last_words = LastWords(self.close)
        self._tasks: Iterator[Task] | None = None  # of the step under way
        self._task: Task | None = None  # the micro-batch under way
        self.loss_scale = loss_scale_of(config.precision, config.loss_scale, config.loss_scale_growth)
        self._last_ledger = LedgerReport({}, {})
        self._trace: tuple[str | os.PathLike[str], int] | None = None  # where to, and after which step
        self._watches_next = False  # the next step's memory is measured
        self._farewell: Timer | None = None  # tells waiting ranks that this one has left its loop
        self._start_persistent()

    def _take(
        self,
        model: nn.Module,
        config: ZeroConfig,
        optimizer: Optimizer | None,
        member: Membership,
        device: torch.device | str | None,
    ) -> None:
        """Look at what was given, alone; raises for what cannot be trained."""
        require_supported(model)
        require_unwatched(model)
        self.module, self.optimizer = model, shardable(optimizer)
        self.config = config.resolved(member.ranks)
        self.rank, self.ranks = member.rank, member.ranks
        self.device = place_of(model, member, device)
        self.layout: Layout = layout_of(model, config.units, self.optimizer)
        self.parameters = tuple(model.get_parameter(entry.spec.name) for entry in self.layout.canonical_entries)
        require_no_gradients(self.layout, self.parameters)
        if config.stage == 3:
            require_open_units(model, self.layout)

    def _assemble(self, first: FirstValues) -> None:
        parts = self._parts = Assembly(
            self.module, self.parameters, self.layout, self.config, self.optimizer, self.comm, self.device, first
        )
        self.master, self._strategy, self._weights_watch = parts.master, parts.strategy, parts.weights

    @property
    def plan(self) -> Plan:
        """Predicted memory and traffic of every rank."""
        return plan_from(self._parts.blueprint)

    def micro_batches(self) -> Iterator[int]:
        """This rank's micro-batch numbers of the next step, in order; each needs its backward before the next.

        Before each, torch's and Python's generators are seeded from (seed, step, number), so that dropout does not
        depend on the rank. A rank may get a number twice when V does not divide evenly; the repeat does not count.
        """
        self._require_working()
        if self._tasks is not None:
            raise UsageError("a step is under way: finish its micro-batches and call engine.step() first")
        self._weights_watch.check()
        with torch._C.DisableTorchFunctionSubclass():  # released parameters would look up what may be asked of them
            trained = [parameter.requires_grad for parameter in self.parameters]
        if trained != self._parts.trainable:
            self._refit(trained)
        self.comm.ledger.clear()
        self.comm.ledger.page = "step"
        self._tally = Tally()
        parts = self._parts
        if self._watches_next:
            self._watches_next = False
            parts.clock.watch(meter_of(self.device))
        self._tasks = parts.blueprint.schedule.tasks(self.rank)
        for task in self._tasks:
            self._task = task
            parts.synchronizer.begin(task)
            parts.hooks.begin()
            self._seed(task.index)
            parts.buffers.remember()
            parts.clock.enter("forward")
            with self._watched():
                yield task.index
            parts.clock.leave()
            if self._task is not None:
                raise UsageError(f"micro-batch {task.index} got no backward: call engine.backward(loss) for it")

    def _require_working(self) -> None:
        if self._closed:
            raise UsageError("the engine is closed: build another around the model")
        if self._broken:
            raise UsageError(
                f"the engine stopped inside a step ({self._broken}), of which it cannot tell what was counted: build "
                "the model and an engine again, and restore a checkpoint"
            )

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Work that this rank must not leave half done: if it does, the waiting ranks fail with the reason."""
        try:
            yield
        except PeerError as error:
            self._broken = str(error)
            self.comm.close(self._broken)
            raise
        except GeneratorExit:
            reason = self._parts.hooks.failure or "it left the loop over its micro-batches"
            self._farewell = Timer(FAREWELL_SECONDS, self.comm.close, [reason])  # unless close() gives a better one
            self._farewell.daemon = True
            self._farewell.start()
            raise
        except BaseException as error:
            self._broken = self._parts.hooks.failure or f"{type(error).__name__}: {error}"
            self.comm.close(self._broken)
            raise

    def _refit(self, trained: Sequence[bool]) -> None:
        """Parameters were frozen or unfrozen: build again around weights, moments and counts."""
        from zero_engine.refit import belongings_of, require_equal_change

        if self._savers:
            raise UsageError("freeze or unfreeze before engine.saver(): background saves keep their layout")
        require_no_gradients(self.layout, self.parameters)
        with self.comm.ledger.on("construction"):
            require_equal_change(self._agreement, self.layout, trained)
            self._build_again(belongings_of(self._subject))

    def _build_again(self, kept: Belongings) -> None:
        """A new layout and new memory around what is kept."""
        from zero_engine.refit import lay_down, take_up

        with self.comm.ledger.on("construction"):
            self._parts.take_down()  # the module is as it was
            lay_down(self.layout, self.parameters, kept)
            self.layout = layout_of(self.module, self.config.units, self.optimizer)
            self._assemble(Built(self.parameters))
            take_up(self.layout, self.master, kept)
        self._forget_subject()

    def _seed(self, index: int) -> None:
        seed = (self.config.seed * 1_000_003 + self.completed_steps) * 1_000_003 + index
        torch.default_generator.manual_seed(seed % (1 << 63))  # torch.manual_seed asks every kind of device: half a ms
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed % (1 << 63))
        random.seed(seed)

    def backward(
        self, loss: Tensor, last: bool = True, weight: float | None = None, retain_graph: bool = False
    ) -> None:
        """Add the gradient of `loss` (a scalar) to the micro-batch under way.

        `last=False`: more backward calls of this micro-batch follow. `weight`: what the loss is a sum over (tokens);
        the step then uses the gradient of sum(losses) / sum(weights). Without it every micro-batch weighs the same.
        `retain_graph`: keep the graph for a further call on the same forward.
        """
        task = self._task
        if task is None:
            raise UsageError("backward belongs inside `for index in engine.micro_batches():`, once per micro-batch")
        self._require_working()
        try:
            require_loss(loss, weight)
            self._parts.buffers.check()
        except EngineError as error:
            words = f"{type(error).__name__}: {error}"
            self._parts.hooks.failure = words  # what others hear if this rank leaves the loop
            raise
        self._tally.record(task, loss.detach(), last, weight)
        scaled = loss if self.loss_scale.scale == 1 else loss * self.loss_scale.scale
        with self._watched():
            with self._parts.clock.phase("backward"), nullcontext() if last else self._parts.synchronizer.no_sync():
                self._parts.hooks.run_backward(scaled, last, retain_graph)
            if last:
                with self._parts.clock.phase("reduce"):
                    self._parts.synchronizer.sync_gradients()
        if last:
            self._task = None

    def step(self, lr: float | Sequence[float] | None = None, flag: int = 0) -> StepResult:
        """Update the weights from all micro-batches of the step; a collective call.

        `lr`: one number, one per optimizer group, or None for the optimizer's own; the same on every rank. `flag`: a
        small integer; every rank gets the largest.
        """
        self._require_working()
        lrs = learning_rates(self.optimizer, lr)
        if not 0 <= flag < FLAGS:
            raise UsageError(f"the flag is {flag}; use a whole number from 0 below {FLAGS}")
        if self._tasks is None or self._task is not None or next(self._tasks, None) is not None:
            raise UsageError("step needs a backward for every number that engine.micro_batches() gives")
        with self._watched():
            result = self._step(lrs, flag)
        exhausted, self.loss_scale = self.loss_scale.exhausted, self.loss_scale.after(not result.skipped)
        overflow = self.loss_scale.growth_steps > 0 and math.isfinite(result.loss)  # of fp16: a smaller scale may help
        if result.skipped and ((self.config.non_finite == "stop" and not overflow) or (overflow and exhausted)):
            raise NonFiniteError(result.problem + ("; the loss scale cannot become smaller" if overflow else ""))
        return result

    def _step(self, lrs: list[float], flag: int) -> StepResult:
        clock, strategy = self._parts.clock, self._parts.strategy
        with clock.phase("reduce"):
            touched = self._parts.synchronizer.finish()
            totals = strategy.reduce_grads()
            outcome = self._parts.mailbox.exchange(self._tally, flag, touched, mark_of(lrs))
        if len(set(outcome.marks)) > 1:
            with self.comm.ledger.on("evaluation"):
                unlike = self._agreement.difference(lrs, repr(lrs), "learning rates")
            raise DivergedError(f"engine.step has the learning rates {unlike}; give all ranks the same")
        weight = sum(outcome.weights)
        norm = norm_of(outcome.block_sums, self.config.clip_norm) / (weight * self.loss_scale.scale or math.nan)
        finite = math.isfinite(norm) and all(map(math.isfinite, outcome.losses))
        if finite:
            with clock.phase("update"):
                for saver in self._savers:
                    saver.hold()
                factor = clip_factor(norm, self.config.gradient_clipping)
                scale = factor / (weight * self.loss_scale.scale)
                self.master.update(totals, scale, lrs, outcome.touched, strategy.unit_updated)
            problem = ""
        else:
            self.master.skip()
            with self.comm.ledger.on("evaluation"):
                found = blame(outcome, self.layout, self.master.pieces, totals, self._agreement)
            problem = f"step {self.completed_steps + 1}: {found}"
        with clock.phase("gather"):
            strategy.gather_weights()
            strategy.post_step()
        return self._finish(outcome, norm, problem)

    def _finish(self, outcome: Outcome, norm: float, problem: str) -> StepResult:
        self.completed_steps += 1
        self._tasks = None
        self._last_ledger = self.comm.ledger.report()
        seconds = self._parts.clock.take()
        if self._trace is not None and self.completed_steps >= self._trace[1]:
            write_trace(self._trace[0], self.rank, self._parts.clock.recorded(), self.comm.ledger.recorded())
            self._trace = None
        self.comm.ledger.page = "evaluation"
        owned = self.memory()
        return StepResult(
            mean_loss(outcome),
            norm,
            bool(problem),
            outcome.flag,
            seconds,
            dict(self._last_ledger.bytes),
            problem,
            sum(self._last_ledger.hidden.values()),
            {phase: {**owned, ACTIVATIONS: count} for phase, count in self._parts.clock.watched().items()},
        )

    @classmethod
    def load(
        cls,
        store: Place,
        model: nn.Module,
        config: ZeroConfig,
        optimizer: Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
        step: int | None = None,
        folder: str | None = None,
        device: torch.device | str | None = None,
        initial: Initial | None = None,
    ) -> Engine:
        """A new engine with the state of a checkpoint: `restore` says which."""
        engine = cls(model, config, optimizer, group, device, initial)
        engine.restore(store, step, folder)
        return engine

    def trace(self, path: str | os.PathLike[str], steps: int = 3) -> None:
        """Write the next `steps` steps as a Chrome trace; "{rank}" in the path becomes this rank's number."""
        self._trace = (path, self.completed_steps + steps)
        self._parts.clock.record()
        self.comm.ledger.record()

    def watch_memory(self) -> None:
        """Measure the next step: its `StepResult.memory` has bytes by category at the peak of each phase.

        Engine-owned categories stand for the whole step; "activations" is everything else that the step allocates,
        gradient leaves and temporaries too. On a CPU every operation of that step takes longer; no bit changes.
        """
        self._watches_next = True

    def self_test(self, build: Callable[[], nn.Module], loss_of: LossOf) -> None:
        """Two steps in this configuration against the plain loop, compared bit for bit; then everything is put back.

        `build` makes the model anew, `loss_of(module, step, index)` gives a micro-batch's loss. Every rank runs the
        whole plain loop, so it needs the memory of one full model. Raises DivergedError naming a parameter.
        """
        from zero_engine.refit import belongings_of
        from zero_engine.self_test import compare, reference_after, run_steps

        if self.completed_steps or self._tasks is not None or self._savers:
            raise UsageError("self_test belongs before the first step and before engine.saver()")
        start, scale = belongings_of(self._subject), self.loss_scale
        run_steps(self, loss_of)
        digest, end = self.digest(), belongings_of(self._subject)
        self._build_again(start)
        self.completed_steps, self.loss_scale = 0, scale
        compare(digest, reference_after(build, self.config, self.optimizer, start, loss_of), end.weights)

    def memory(self) -> dict[str, int]:
        """Bytes the engine owns on this rank, by category; equals `engine.plan.memory[rank]`."""
        return self._parts.arenas.memory()

    def ledger(self, page: str = "step") -> LedgerReport:
        """This rank's last step by "collective/purpose", or all of "construction", "evaluation", "load" or "save"."""
        return self._last_ledger if page == "step" else self.comm.ledger.report(page)

    def close(self, error: str | None = None) -> None:
        """Take the hooks out and give transport and memory back; with `error`, waiting ranks fail with it. Once."""
        if self._closed:
            return
        self._closed = True
        self._last_words.cancel()
        if self._farewell is not None:
            self._farewell.cancel()
        for saver in self._savers:
            saver.close(abandon=error is not None)
        self._parts.take_down()
        self._parts.clock.watched()
        if error is not None and self._parts.hooks.failure.startswith(error):
            error = self._parts.hooks.failure  # the same, with the module's name
        self.comm.close(error)
