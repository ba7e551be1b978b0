"""The loop: micro-batches, step, evaluation, checkpoint, report; until the last step or a stop.

All ranks leave at the same step, since the wish to stop rides on the exchange that every step ends with.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Literal, NoReturn, Protocol

from workers.build import Loss, moved
from workers.contract import STOP_FILE, LaunchOrder
from workers.data.batches import Data
from workers.evaluation import evaluate
from workers.measuring import Sampler
from workers.reporter import DIGEST_ACTION, Reporter
from workers.restoring import Progressed
from workers.schedule import learning_rate
from zero_engine import Engine, StepResult

EVENTS_OF_A_KIND = 10  # an attempt reports so many skipped steps one by one


class Word(IntEnum):
    """What a rank says with the exchange that ends a step; every rank hears the largest, so that all do the same."""

    NOTHING = 0
    BUSY = 1  # a save is under way
    STOP = 2  # somebody asked to stop
    SAVE_FAILED = 3  # and the policy is to stop for that


class Saving(Protocol):
    """Where checkpoints go. Every rank makes the same calls at the same steps."""

    def prepare(self) -> None:
        """A `begin` will come."""

    def look(self) -> Word:
        """Tell what became of saves; NOTHING, BUSY or SAVE_FAILED."""

    def begin(self, progressed: Progressed, eval_loss: float | None, *, busy: bool) -> None:
        """Save the state as it is beside training. `busy`: some rank still works on the save before."""

    def settle(self) -> None:
        """No rank has a save under way."""

    def finish(self, progressed: Progressed, eval_loss: float | None) -> None:
        """Save the state as it is and return when it is durable; a failure is an exception."""

    def give_up(self) -> NoReturn:
        """Some rank said SAVE_FAILED: raise."""


class NoSaving:
    """A run that keeps nothing."""

    def prepare(self) -> None:
        """Nothing."""

    def look(self) -> Word:
        """Nothing to say."""
        return Word.NOTHING

    def begin(self, progressed: Progressed, eval_loss: float | None, *, busy: bool) -> None:
        """Nothing."""

    def settle(self) -> None:
        """Nothing."""

    def finish(self, progressed: Progressed, eval_loss: float | None) -> None:
        """Nothing."""

    def give_up(self) -> NoReturn:
        """Never called: nothing is saved."""
        raise AssertionError("a run that saves nothing has no failed save")


@dataclass
class Training:
    """One rank's part of an attempt from its first step to its last."""

    order: LaunchOrder
    engine: Engine
    data: Data
    loss: Loss
    reporter: Reporter
    saving: Saving
    skipped: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.train, self.checkpoint = self.order.spec.train, self.order.spec.checkpoint
        self.sampler = Sampler(self.engine, self.reporter, self.order.sample_seconds)
        self.stop_file = Path(self.order.rank_folder, STOP_FILE)
        self.evaluates = self.train.eval.every > 0 and self.data.validation_batches > 0

    def run(self, progressed: Progressed) -> Literal["finished", "stopped"]:
        """Go on from there to the last step."""
        completed, self.skipped = progressed.completed, progressed.skipped
        if self.train.eval.every and not self.data.validation_batches:
            self.reporter.event("eval.off", "the validation part is shorter than one context: no evaluation")
        if completed == 0 and self.evaluates:
            self._report_points(0, {"eval_loss": self._evaluated()})
        while completed < self.train.steps:
            self.sampler.prepare(last=completed + 1 == self.train.steps)
            begun = time.monotonic()
            result, rate = self._step(completed)
            seconds = time.monotonic() - begun
            completed += 1
            self.reporter.step = completed
            last = completed == self.train.steps
            stops = (result.flag == Word.STOP or completed == self.order.until) and not last
            eval_loss = self._evaluated() if self._is_measured(completed) else None
            self._report(completed, result, rate, seconds, eval_loss, always=last or stops)
            self._save(completed, Word(result.flag), eval_loss, must=last or stops)
            if stops:
                return "stopped"
            if completed == progressed.completed + 1 and self._saves_beside_training(completed):
                self.saving.prepare()
        return "finished"

    def _save(self, completed: int, heard: Word, eval_loss: float | None, *, must: bool) -> None:
        progressed = Progressed(completed, self.skipped)
        if heard == Word.NOTHING:
            self.saving.settle()
        if must:
            self.saving.finish(progressed, eval_loss)
        elif heard == Word.SAVE_FAILED:
            self.saving.give_up()
        elif self._is_due(completed, self.checkpoint.every):
            self.saving.begin(progressed, eval_loss, busy=heard == Word.BUSY)

    def _saves_beside_training(self, completed: int) -> bool:
        """Whether a save is due before the last step."""
        every = self.checkpoint.every
        return every > 0 and (completed // every + 1) * every < self.train.steps

    def _step(self, completed: int) -> tuple[StepResult, float]:
        rate = learning_rate(self.train, completed - self.skipped)
        for index in self.engine.micro_batches():
            batch = moved(self.data.micro_batch(completed, index), self.engine.device)
            self.engine.backward(self.loss(self.engine.module, batch))
        return self.engine.step(lr=rate, flag=self._word()), rate

    def _word(self) -> Word:
        return max(self.saving.look(), Word.STOP if self.stop_file.exists() else Word.NOTHING)

    def _is_due(self, step: int, every: int) -> bool:
        return step == self.train.steps or (every > 0 and step % every == 0)

    def _is_measured(self, step: int) -> bool:
        """Evaluation is due, or a checkpoint of which the best are kept."""
        saves = bool(self.checkpoint.keep_best) and self._is_due(step, self.checkpoint.every)
        return self.evaluates and (saves or self._is_due(step, self.train.eval.every))

    def _evaluated(self) -> float:
        return evaluate(self.engine, self.data, self.loss, self.train.eval.batches)

    def _report(
        self, step: int, result: StepResult, rate: float, seconds: float, eval_loss: float | None, *, always: bool
    ) -> None:
        self.sampler.sample(step, result, always)
        every = self.order.digest_every
        if step == self.train.steps or (every and step % every == 0):
            digest = self.engine.digest()
            if self.order.rank == 0:
                self.reporter.event(DIGEST_ACTION, f"state after step {step}: {digest}", step=step, digest=digest)
        if result.skipped:
            self.skipped += 1
            self._report_skipped(step, result)
        values = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": rate,
            "seconds": seconds,
            "tokens_per_second": self.train.global_batch * self.data.units_per_sample / seconds,
        }
        if eval_loss is not None:
            values["eval_loss"] = eval_loss
        self._report_points(step, values)

    def _report_points(self, step: int, values: dict[str, float]) -> None:
        if self.order.rank == 0:
            self.reporter.points(step, values)

    def _report_skipped(self, step: int, result: StepResult) -> None:
        if self.order.rank == 0 and self.skipped <= EVENTS_OF_A_KIND:
            rest = "; more of them are not reported one by one" if self.skipped == EVENTS_OF_A_KIND else ""
            self.reporter.event(
                "step.skipped",
                f"{result.problem}: the step was skipped, weights and moments are as before{rest}",
                step=step,
                loss=result.loss,
                grad_norm=result.grad_norm,
            )
