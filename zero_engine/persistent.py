"""What outlives a step: digests, checkpoints, whole weights. The engine's face towards its state; no training here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from zero_engine.adamw import Optimizer
from zero_engine.agree import Agreement
from zero_engine.comm import Comm
from zero_engine.config import ZeroConfig
from zero_engine.digest import counts_part, hex_of, run_part
from zero_engine.errors import ConfigError, UsageError
from zero_engine.fold import Task
from zero_engine.layout import Layout
from zero_engine.loss_scale import LossScale
from zero_engine.master import Master
from zero_engine.strategy import ShardingStrategy
from zero_engine.weight_watch import WeightWatch

if TYPE_CHECKING:  # checkpoint files load xxhash, which a plain training run can do without
    from zero_engine.checkpoint import Checkpoints, Loaded, Place
    from zero_engine.manifest import Manifest, Progress
    from zero_engine.saver import Policy, Saver
    from zero_engine.state import Subject


class Persistent:
    """State of a built engine, as it can be named, saved, taken over and handed out whole."""

    module: nn.Module
    config: ZeroConfig  # resolved
    optimizer: Optimizer
    layout: Layout
    comm: Comm
    rank: int
    ranks: int
    device: torch.device
    master: Master
    loss_scale: LossScale
    completed_steps: int  # applied or skipped
    _agreement: Agreement
    _strategy: ShardingStrategy
    _tasks: Iterator[Task] | None  # of the step under way
    _weights_watch: WeightWatch
    _closed: bool

    def _start_persistent(self) -> None:
        self._closed = False
        self.loaded: Loaded | None = None  # the checkpoint this engine started from
        self._savers: list[Saver] = []  # background saves, which must have copied the state before it changes

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "an engine cannot be copied or pickled: it holds connections and memory of one process; save it with "
            "engine.save(store), or take its weights with engine.full_state_dict()"
        )

    def digest(self) -> str:
        """16 hex digits of canonical parameters, moments and step counts; a collective call, the same on every rank."""
        self._require_open("digest")
        parts = self._agreement.tell(str(self.digest_part()), "digest")
        return hex_of(sum(map(int, parts)))

    def digest_part(self) -> int:
        """This rank's part of the digest, modulo 2^64."""
        total = counts_part(self.layout, self.master.steps, self.completed_steps) if self.rank == 0 else 0
        for piece in self.layout.pieces(self.rank, self.ranks):
            for kind, values in self.master.tensors(piece.run, piece.range).items():
                total += run_part(self.layout, kind, piece.run, piece.range, values)
        return total % (1 << 64)

    @cached_property
    def _subject(self) -> Subject:
        """This engine as its checkpoints see it."""
        from zero_engine.state import Subject

        strategy = self._strategy
        return Subject(
            self.layout, self.config, self.comm, self._agreement, self.master, self.module, self.optimizer, self.device,
            strategy.frozen_weights, lambda: self.completed_steps, strategy.open_weights, self._loss_scale_state,
            self._restored,
        )  # fmt: skip

    @cached_property
    def _checkpoints(self) -> Checkpoints:
        from zero_engine.checkpoint import Checkpoints

        return Checkpoints(self._subject)

    def save(
        self, store: Place, step: int | None = None, fence: int | None = None, progress: Progress | None = None
    ) -> Manifest:
        """Save the whole state and return the published manifest; a collective call between steps.

        `store`: a folder or a Store. `step` only names the checkpoint and defaults to the completed steps, `fence` (the
        number of the attempt) to one above all in the store. Raises CheckpointError on every rank when any failed;
        older checkpoints stay.
        """
        self._require_boundary("save")
        for saver in self._savers:
            saver.wait()  # it may be at this very step
        return self._checkpoints.save(store, self.completed_steps if step is None else step, fence, progress)

    def saver(
        self, store: Place, fence: int | None = None, policy: Policy = "wait", patience_seconds: float = 600.0
    ) -> Saver:
        """Background saves into a store: `save` begins one, `poll` tells how they ended, `close` ends them."""
        from zero_engine.saver import Saver

        saver = Saver(self._subject, *self._checkpoints.resolve(store, fence), policy, patience_seconds)
        self._savers.append(saver)
        return saver

    def restore(self, store: Place, step: int | None = None, folder: str | None = None) -> Loaded:
        """Take over a checkpoint that any stage and number of ranks saved; a collective call between steps.

        The newest that verifies, the newest of `step`, or `folder` (where it cannot be used, the one before it). What
        comes back, also as `engine.loaded`, says which it is, which could not be used and why. Raises CheckpointError
        when there is none.
        """
        self._require_boundary("restore")
        for saver in self._savers:
            saver.hold()
        self.loaded = self._checkpoints.load(store, step, folder)
        return self.loaded

    def _forget_subject(self) -> None:
        """The engine was built again: checkpoints must see the new parts."""
        for name in ("_subject", "_checkpoints"):
            self.__dict__.pop(name, None)

    def _require_open(self, action: str) -> None:
        if self._closed:
            raise UsageError(f"{action} needs an open engine, and this one is closed")

    def _require_boundary(self, action: str) -> None:
        self._require_open(action)
        if self._tasks is not None:
            raise UsageError(f"{action} belongs between steps: finish the micro-batches and call engine.step() first")

    def _loss_scale_state(self) -> dict[str, Any]:
        return {"scale": self.loss_scale.scale, "finite_steps": self.loss_scale.finite_steps}

    def _restored(self, scalars: dict[str, Any]) -> None:
        """Masters and moments were written from outside: take over the counts, bring weights to where they compute."""
        self.completed_steps = scalars["completed_steps"]
        self.master.steps[:] = scalars["counts"]
        if self.config.precision == "fp16":
            self.loss_scale = replace(self.loss_scale, **scalars["loss_scale"])
        self.master.forget_spans()
        self._bring_weights()

    def _bring_weights(self) -> None:
        """Masters were written from outside: bring current weights to where they compute."""
        self.master.refresh_compute()
        self._strategy.gather_weights()
        self._strategy.post_step()
        self._weights_watch.remember()

    def full_state_dict(self, kind: str = "parameter") -> dict[str, Tensor]:
        """All parameters (in the dtype the model was built with) and buffers by name, on every host; collective.

        `kind`: the name of an optimizer state gives that in place of the parameters, such as "ema". Raises ConfigError
        for one that the optimizer does not keep.
        """
        from zero_engine.full import full_state_dict

        self._require_open("full_state_dict")
        known = ("parameter", *self.optimizer.moments)
        if kind not in known:
            raise ConfigError(f"kind is {kind!r}, which this optimizer does not keep; use one of {', '.join(known)}")
        return full_state_dict(self._subject, kind)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over whole weights (and buffers) by name, alike on every rank; moments and counts stay. Collective.

        Raises ModelError naming what is missing, unknown or of another shape; then nothing was written.
        """
        from zero_engine.full import load_full_state_dict

        self._require_boundary("load_full_state_dict")
        for saver in self._savers:
            saver.hold()
        with self.comm.ledger.on("load"):
            load_full_state_dict(self._subject, state)
            self._bring_weights()

    def export_safetensors(self, path: str | os.PathLike[str]) -> None:
        """Write all parameters and buffers as one safetensors file from rank 0, tied ones once; collective."""
        from zero_engine.full import export_safetensors

        self._require_open("export_safetensors")
        export_safetensors(self._subject, path)
