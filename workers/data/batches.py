"""What a rank asks for: micro-batches by (step, number), evaluation batches by number, as tensors on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.data.errors import DataError
from workers.data.order import sample_indices


class Batch(NamedTuple):
    """Inputs and targets of one micro-batch."""

    inputs: Tensor  # (B, T) int64 token ids, or (B, 64) float32 pixels
    targets: Tensor  # (B, T) int64 next ids, or (B,) int64 classes


@dataclass(frozen=True)
class BatchShape:
    """What fixes which samples a micro-batch has, whatever the number of ranks."""

    seed: int
    micro_batches: int  # V, per step
    micro_batch: int  # samples in one

    def first_sample(self, step: int, index: int) -> int:
        """Number of the first sample of micro-batch `index` of the step that follows `step` completed ones."""
        return (step * self.micro_batches + index) * self.micro_batch


class Data(Protocol):
    """Training and validation samples in an order that depends on the seed alone."""

    content_hash: str  # 64 hex digits; a resume on other data is refused
    tokenizer: Path | None  # file that `tokenizers` reads, kept with every checkpoint
    outputs: int  # classes, or vocabulary
    inputs: int  # width of an input vector; the vocabulary for tokens
    units_per_sample: int  # tokens of a sequence; 1 for an image
    validation_batches: int  # there are; 0: evaluation is off

    def micro_batch(self, step: int, index: int) -> Batch:
        """Micro-batch `index` of the step after `step` completed ones."""

    def validation_batch(self, number: int) -> Batch:
        """Validation batch `number`, the same at every step."""


class TokenBatches:
    """Sequences of `context` tokens cut from one row of ids; the targets are the ids one place further."""

    units_per_sample: int

    def __init__(
        self,
        train: NDArray[Any],
        validation: NDArray[Any],
        *,
        vocabulary: int,
        context: int,
        shape: BatchShape,
        content_hash: str,
        tokenizer: Path | None = None,
    ) -> None:
        self._train, self._validation, self._shape, self._context = train, validation, shape, context
        self.inputs = self.outputs = vocabulary
        self.units_per_sample = context
        self.content_hash, self.tokenizer = content_hash, tokenizer
        self.num_samples = max(0, len(train) - 1) // context
        if not self.num_samples:
            raise DataError(
                f"the training text has {len(train):,} tokens, fewer than one context of {context} and its target; "
                "use more text or a shorter model.context"
            )
        self._validation_samples = max(0, len(validation) - 1) // context
        self.validation_batches = whole_batches(self._validation_samples, shape.micro_batch)

    def micro_batch(self, step: int, index: int) -> Batch:
        shape = self._shape
        first = shape.first_sample(step, index)
        return self._cut(self._train, sample_indices(shape.seed, first, shape.micro_batch, self.num_samples))

    def validation_batch(self, number: int) -> Batch:
        size = min(self._shape.micro_batch, self._validation_samples)
        return self._cut(self._validation, spread(number * size, size, self._validation_samples))

    def _cut(self, tokens: NDArray[Any], samples: list[int]) -> Batch:
        length = self._context
        rows = np.stack([tokens[sample * length : (sample + 1) * length + 1] for sample in samples]).astype(np.int64)
        if rows.max() >= self.outputs:
            raise DataError(f"the data holds token id {rows.max()}, but its side file says vocabulary {self.outputs}")
        ids = torch.from_numpy(rows)
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


class ArrayBatches:
    """Vectors with a class each; every tenth is held out."""

    units_per_sample = 1
    tokenizer: Path | None = None

    def __init__(
        self, inputs: NDArray[np.float32], targets: NDArray[np.int64], *, shape: BatchShape, content_hash: str
    ):
        held_out = np.arange(len(inputs)) % 10 == 9
        self._train = (inputs[~held_out], targets[~held_out])
        self._validation = (inputs[held_out], targets[held_out])
        self._shape = shape
        self.inputs = inputs.shape[1]
        self.outputs = int(targets.max()) + 1
        self.content_hash = content_hash
        self.num_samples = len(self._train[0])
        self.validation_batches = whole_batches(len(self._validation[0]), shape.micro_batch)

    def micro_batch(self, step: int, index: int) -> Batch:
        shape = self._shape
        chosen = sample_indices(shape.seed, shape.first_sample(step, index), shape.micro_batch, self.num_samples)
        return Batch(torch.from_numpy(self._train[0][chosen]), torch.from_numpy(self._train[1][chosen]))

    def validation_batch(self, number: int) -> Batch:
        size = min(self._shape.micro_batch, len(self._validation[0]))
        part = spread(number * size, size, len(self._validation[0]))
        return Batch(torch.from_numpy(self._validation[0][part]), torch.from_numpy(self._validation[1][part]))


def spread(first: int, count: int, num_samples: int) -> list[int]:
    """Validation samples `first` and on: each once, spread over all of them, the same whatever the seed."""
    return sample_indices(0, first, count, num_samples)


def whole_batches(num_samples: int, micro_batch: int) -> int:
    """Evaluation batches of `micro_batch` samples there are; a smaller set than that is one batch."""
    return num_samples // micro_batch or min(num_samples, 1)


def tokens_split(tokens: NDArray[Any], path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """A row of ids without a validation file: its last 5 % are held out."""
    if not len(tokens):
        raise DataError(f"{path} is empty")
    cut = len(tokens) - len(tokens) // 20
    return tokens[:cut], tokens[cut:]
