"""How long a step should take: operations, bytes and a machine's measured rates. Torch-free.

    compute    a rank's micro-batches of the step x (operations of products / matmul rate + of attention / attention
               rate + bytes of activations that other operations pass / activation rate + of gradients / memory rate)
    exchange   payload bytes that the busiest rank sends, and its own weights that it copies into slots / exchange rate
    update     bytes that fold and optimizer read and write on a rank / memory rate + elements of the norm / norm rate
    total      their sum, times ranks / cores where ranks share cores

The rates come from a calibration of about ten seconds (`workers/calibrate.py`), kept per machine, torch build and
threads (`workers/calibrations.py`). Not counted: products that are smaller than a layer's of width 512,
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
    "Matrix products, attention, the bytes of other operations, of gradients and of optimizer states, the norm and "
    "payload, each at its calibrated rate, without overlap; data and evaluation are not counted."
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
    attention_flops: Annotated[float, Field(gt=0, description="operations a second of attention, both ways")]
    activation_bytes: Annotated[
        float, Field(gt=0, description="bytes a second that norms, activation functions, sums and the loss pass")
    ]
    memory_bytes: Annotated[float, Field(gt=0, description="bytes read and written a second")]
    norm_elements: Annotated[float, Field(gt=0, description="elements a second whose squares are summed in double")]
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
    flops: int  # of one micro-batch, attention's too
    attention_flops: int
    activation_bytes: int
    gradient_bytes: int  # of all trained parameters, in the dtype of a leaf
    folded_elements: int  # read and written by the fold: pieces of what the rank owns, and their sums
    normed_elements: int
    sent_bytes: int
    copied_bytes: int  # own weights, into slots
    updated_elements: int
    moments: int
    ranks: int


def predict(work: Work, rates: Calibration) -> StepSeconds:
    """Seconds of a step."""
    products = (work.flops - work.attention_flops) / rates.matmul_flops
    attention = work.attention_flops / rates.attention_flops
    passes = ACTIVATION_PASSES * work.activation_bytes / rates.activation_bytes
    leaves = GRADIENT_PASSES * work.gradient_bytes / rates.memory_bytes
    compute = work.micro_batches * (products + attention + passes + leaves)
    exchange = (work.sent_bytes + work.copied_bytes) / rates.exchange_bytes
    moved = update_bytes(work.updated_elements, work.moments) + 4 * work.folded_elements
    update = moved / rates.memory_bytes + work.normed_elements / rates.norm_elements
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


def gpt_attention_flops(model: GptModel, samples: int, checkpointing: str) -> int:
    """Those of them that are attention's."""
    attention = 4 * samples * model.context**2 * model.hidden
    kinds = block_kinds(checkpointing, model.layers)
    return sum(attention * 7 // 2 + (attention if kind == "full" else 0) for kind in kinds)


def mlp_flops(widths: Sequence[int], samples: int) -> int:
    """Operations of one micro-batch: three products a layer, two for the first, whose inputs need no gradient."""
    weights = [before * after for before, after in pairwise(widths)]
    return 2 * samples * (3 * sum(weights) - weights[0])
