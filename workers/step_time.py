"""How long a step should take: operations, bytes and a machine's measured rates. Torch-free.

    compute    a rank's micro-batches of the step x (operations / matmul rate + bytes of activations and gradients that
               move / memory rate)
    exchange   payload bytes that the busiest rank sends / exchange rate
    update     bytes that the fold, the norm and the optimizer read and write on a rank / memory rate
    total      their sum, times ranks / cores where ranks share cores

The rates come from a calibration of about ten seconds (`workers/calibrate.py`), kept per machine, torch build and
threads (`workers/calibrations.py`). Not counted: kernels that are slower than one large product (small matrices),
overlap of messages with backward, data loading, evaluation. The error is shown beside the measured time, so that
nobody has to believe the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from workers.activation_bytes import block_kinds
from workers.spec import GptModel

Device = Literal["cpu", "cuda"]
ACTIVATION_PASSES = 4  # written in forward, read and its gradient written and read in backward
GRADIENT_PASSES = 3  # each leaf is read; its buffer written, or read and written
BASIS = (
    "Matrix products at the calibrated rate, activations, gradients and optimizer states at memory bandwidth, payload "
    "at the exchange rate, without overlap; small kernels, data and evaluation are not counted."
)


class Calibration(BaseModel):
    """What a machine reached, for one rank, or one GPU."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Device
    hardware: str
    torch: str
    cores: int
    threads: int  # of the rank
    matmul_flops: Annotated[float, Field(gt=0, description="floating-point operations a second, fp32; bf16 on CUDA")]
    memory_bytes: Annotated[float, Field(gt=0, description="bytes read and written a second")]
    exchange_bytes: Annotated[float, Field(gt=0, description="payload bytes a second between two ranks")]
    day: str | None = None  # on which it was measured, as in 2026-11-30


class StepSeconds(BaseModel):
    """A predicted step."""

    model_config = ConfigDict(frozen=True)

    compute: float
    exchange: float
    update: float
    total: float


class Work(BaseModel):
    """What one rank does in a step."""

    model_config = ConfigDict(frozen=True)

    micro_batches: int
    flops: int  # of one micro-batch
    activation_bytes: int
    gradient_bytes: int  # of all trained parameters, in the dtype of a leaf
    folded_elements: int  # read by the fold and the norm: own pieces and their sums
    sent_bytes: int
    updated_elements: int
    moments: int
    ranks: int


def predict(work: Work, rates: Calibration) -> StepSeconds:
    """Seconds of a step."""
    moved = ACTIVATION_PASSES * work.activation_bytes + GRADIENT_PASSES * work.gradient_bytes
    compute = work.micro_batches * (work.flops / rates.matmul_flops + moved / rates.memory_bytes)
    exchange = work.sent_bytes / rates.exchange_bytes
    update = (update_bytes(work.updated_elements, work.moments) + 4 * work.folded_elements) / rates.memory_bytes
    sharing = max(1.0, work.ranks * rates.threads / rates.cores) if rates.device == "cpu" else 1.0
    parts = [sharing * each for each in (compute, exchange, update)]
    return StepSeconds(compute=parts[0], exchange=parts[1], update=parts[2], total=sum(parts))


def update_bytes(elements: int, moments: int) -> int:
    """Bytes of an element-wise fp32 update: weight and moments read and written, the sum read."""
    return 4 * elements * (2 + 2 * moments + 1)


def gpt_flops(model: GptModel, vocabulary: int, samples: int, checkpointing: str) -> int:
    """Operations of matrix products and attention of one micro-batch, forward, backward and recomputed.

    As kernels count them: attention over all pairs, its backward with the scores once more.
    """
    tokens, width = samples * model.context, model.hidden
    block = 2 * tokens * 12 * width**2
    attention = 4 * samples * model.context**2 * width
    total = 3 * 2 * tokens * width * vocabulary
    for kind in block_kinds(checkpointing, model.layers):
        total += 3 * block + attention * 7 // 2
        if kind == "full":  # up to what backward needs: the last product of a block is not repeated
            total += block * 8 // 12 + attention
        elif kind == "selective":  # the product that widens fourfold is made again
            total += block * 4 // 12
    return total


def mlp_flops(widths: Sequence[int], samples: int) -> int:
    """Operations of one micro-batch: three products a layer, two for the first, whose inputs need no gradient."""
    weights = [before * after for before, after in pairwise(widths)]
    return 2 * samples * (3 * sum(weights) - weights[0])
