"""The same arithmetic as a plain loop in one process: what every stage and rank count must equal, bit for bit.

It has the engine's face and none of its parts: gradients are whole tensors in a dict, there is no communication, no
sharding and no flat buffer. Only the layout is shared, because the norm is a sum of block sums.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from zero_engine.adamw import AdamW, Optimizer
from zero_engine.buckets import leaf_dtype
from zero_engine.clip import block_sums, clip_factor, norm_of
from zero_engine.config import ZeroConfig
from zero_engine.digest import digest_of
from zero_engine.flat import layout_of
from zero_engine.layout import ALIGNMENT, Entry
from zero_engine.loss_scale import loss_scale_of
from zero_engine.precision import InputCast
from zero_engine.step_result import StepResult
from zero_engine.trace import PHASES


class Reference:
    """Trains `model` with V micro-batches in chunks of C, one after the other."""

    def __init__(self, model: nn.Module, config: ZeroConfig, optimizer: Optimizer | None = None) -> None:
        self.module = model
        self.optimizer: Optimizer = AdamW() if optimizer is None else optimizer
        self.config = config.resolved(1)
        self.layout = layout_of(model, config.units, self.optimizer)
        entries = self._entries = self.layout.canonical_entries
        self._parameters = {entry.spec.name: model.get_parameter(entry.spec.name) for entry in entries}
        self.masters = {e.spec.name: self._master_of(e) for e in entries if e.spec.trainable}
        self._cast_frozen()
        self.moments = {
            kind: {name: _padded(torch.zeros_like(master)) for name, master in self.masters.items()}
            for kind in self.optimizer.moments
        }
        self.steps = {entry.spec.name: 0 for entry in entries}
        self.completed_steps = 0
        self._cast = InputCast(model, getattr(torch, self.config.compute_dtype))
        self.loss_scale = loss_scale_of(config.precision, config.loss_scale, config.loss_scale_growth)
        self._chunk: dict[str, Tensor] = {}  # sums of the chunk under way
        self._total: dict[str, Tensor] = {}  # sums of finished chunks
        self._losses: dict[int, float] = {}
        self._weights: dict[int, float] = {}

    def _master_of(self, entry: Entry) -> Tensor:
        """fp32 weights; the parameter is a view of them where it computes in fp32, else a cast of them."""
        parameter = self._parameters[entry.spec.name]
        master = _padded(parameter.detach().to(torch.float32))
        dtype = getattr(torch, leaf_dtype(entry.spec.dtype, self.config.compute_dtype))
        parameter.data = master if dtype == torch.float32 else master.to(dtype)
        return master

    def micro_batches(self) -> Iterator[int]:
        """All micro-batch numbers, seeded as the engine does."""
        self._refit()
        micro_batches, chunk = self.config.batch_shape
        for index in range(micro_batches):
            seed = (self.config.seed * 1_000_003 + self.completed_steps) * 1_000_003 + index
            torch.manual_seed(seed % (1 << 63))
            random.seed(seed)
            self._index = index
            yield index
            if (index + 1) % chunk == 0 or index + 1 == micro_batches:
                _fold(self._total, self._chunk)
                self._chunk = {}

    def _refit(self) -> None:
        """What was frozen since the last step loses its states, what was unfrozen starts with new ones."""
        if all(e.spec.trainable == self._parameters[e.spec.name].requires_grad for e in self._entries):
            return
        declared = {entry.spec.name: entry.spec.dtype for entry in self._entries}
        for name, parameter in self._parameters.items():
            parameter.data = self.masters.get(name, parameter.data).to(getattr(torch, declared[name]))
        self.layout = layout_of(self.module, self.config.units, self.optimizer)
        self._entries = self.layout.canonical_entries
        trainable = {e.spec.name: e for e in self._entries if e.spec.trainable}
        before, self.masters = self.masters, {name: self._master_of(entry) for name, entry in trainable.items()}
        self.moments = {
            kind: {n: known[n] if n in before else _padded(torch.zeros_like(self.masters[n])) for n in trainable}
            for kind, known in self.moments.items()
        }
        self.steps = {name: self.steps[name] if name in before and name in trainable else 0 for name in self.steps}
        self._cast_frozen()

    def _cast_frozen(self) -> None:
        """What is frozen computes in the dtype of what trains."""
        for entry in self._entries:
            if not entry.spec.trainable:
                parameter = self._parameters[entry.spec.name]
                dtype = leaf_dtype(entry.spec.dtype, self.config.compute_dtype)
                parameter.data = parameter.data.to(getattr(torch, dtype))

    def backward(
        self, loss: Tensor, last: bool = True, weight: float | None = None, retain_graph: bool = False
    ) -> None:
        """Gradients gather in `.grad` until the last call, then are added to the chunk."""
        index = self._index
        self._losses[index] = self._losses.get(index, 0.0) + float(loss.detach().double())
        if weight is not None:
            self._weights[index] = self._weights.get(index, 0.0) + float(weight)
        elif last:
            self._weights.setdefault(index, 1.0)
        scaled = loss if self.loss_scale.scale == 1 else loss * self.loss_scale.scale
        scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        if last:
            piece = {name: p.grad.float() for name, p in self._parameters.items() if p.grad is not None}
            _fold(self._chunk, piece)
            for parameter in self._parameters.values():
                parameter.grad = None

    def step(self, lr: float | Sequence[float] | None = None, flag: int = 0) -> StepResult:
        """One update from the totals."""
        weight = sum(self._weights[index] for index in sorted(self._weights))
        norm = norm_of(self._block_sums(), self.config.clip_norm) / (weight * self.loss_scale.scale or math.nan)
        loss = sum(self._losses[index] for index in sorted(self._losses)) / (weight or math.nan)
        finite = math.isfinite(norm) and all(map(math.isfinite, self._losses.values()))
        if finite:
            factor = clip_factor(norm, self.config.gradient_clipping)
            self._update(lr, factor / (weight * self.loss_scale.scale))
        self.loss_scale = self.loss_scale.after(finite)
        self.completed_steps += 1
        self._total, self._losses, self._weights = {}, {}, {}
        return StepResult(loss, norm, not finite, flag, dict.fromkeys(PHASES, 0.0), {})

    def _update(self, lr: float | Sequence[float] | None, scale: float) -> None:
        updates = self.optimizer.updates()
        for entry in self._entries:
            name = entry.spec.name
            if name in self._total:
                update, own = updates[entry.spec.group]
                rate = own if lr is None else lr[entry.spec.group] if isinstance(lr, Sequence) else lr
                self.steps[name] += 1
                moments = [_flat(tensors[name]) for tensors in self.moments.values()]
                gradient = _flat(_padded(self._total[name] * scale))
                update(_flat(self.masters[name]), gradient, moments, self.steps[name], rate)
                parameter = self._parameters[name]
                if parameter.dtype != torch.float32:
                    parameter.data.copy_(self.masters[name])

    def _block_sums(self) -> Tensor:
        """Of all trainable runs, laid out and padded as the layout says."""
        sums = [torch.zeros(0, dtype=torch.float64)]
        for number, run in enumerate(self.layout.runs):
            if run.trainable:
                flat = torch.zeros(run.stop - run.start, dtype=torch.float32)
                for entry in self._entries:
                    if entry.run == number and entry.spec.name in self._total:
                        start = entry.start - run.start
                        flat[start : start + entry.spec.numel] = self._total[entry.spec.name].reshape(-1)
                out = torch.zeros(len(flat) // self.layout.block, dtype=torch.float64)
                rows = flat.view(-1, self.layout.block)
                block_sums(rows, self.config.clip_norm, torch.empty_like(rows, dtype=torch.float64), out)
                sums.append(out)
        return torch.cat(sums)

    def digest(self) -> str:
        """As the engine's."""
        frozen = {e.spec.name: self._parameters[e.spec.name] for e in self._entries if not e.spec.trainable}
        states = {"parameter": self.masters | frozen, **self.moments}
        return digest_of(self.layout, states, self.steps, self.completed_steps)


def _fold(sums: dict[str, Tensor], piece: dict[str, Tensor]) -> None:
    """Add a piece to sums; the first is taken as it is."""
    for name, values in piece.items():
        sums[name] = sums[name] + values if name in sums else values


def _padded(values: Tensor) -> Tensor:
    """A contiguous copy whose storage ends on a multiple of ALIGNMENT.

    Note: torch's fused AdamW rounds the last `numel % 8` elements differently (no vector fits them). The engine's cuts
    never have such a tail, so the reference must not have one either.
    """
    flat = torch.zeros(-(-values.numel() // ALIGNMENT) * ALIGNMENT, dtype=values.dtype, device=values.device)
    flat[: values.numel()] = values.reshape(-1)
    return flat[: values.numel()].view(values.shape)


def _flat(values: Tensor) -> Tensor:
    """The whole storage of a padded tensor, 1-D."""
    return values.as_strided((values.untyped_storage().nbytes() // values.element_size(),), (1,))
