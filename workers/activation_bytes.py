"""What one micro-batch of our models holds beside weights and the engine's own memory, from shapes alone. Torch-free.

Each line follows the operations of `workers/models/gpt.py` or `mlp.py` through forward and backward and takes the
largest of the moments that can be the peak: the loss, the output projection, and the last unit's backward (with its
recomputation where it is checkpointed). A test holds it to within 5 % (10 % with dropout on a CPU) of a pass on tensors
without contents (`zero_engine/dry_run.py`), by which a user's model is estimated, and that to torch's memory tracker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from workers.spec import GptModel

LOGIT_BYTES = 4  # logits are fp32 in the loss, whatever the model computes in


@dataclass(frozen=True)
class Batch:
    """What runs at once."""

    samples: int
    item_bytes: int  # of the compute dtype
    checkpointing: str  # none | full | selective | every:k
    device: str  # cpu | cuda


def gpt_activations(model: GptModel, vocabulary: int, batch: Batch) -> int:
    """Peak bytes of a GPT.

    Per token a block keeps 16 vectors of the width (6 where the MLP and cheap operations are recomputed, 1 where all
    are), with dropout on a CPU 18, and there three scores per pair of positions and head, which attention on a GPU
    never stores.
    """
    tokens, width = batch.samples * model.context, model.hidden
    vector = tokens * width * batch.item_bytes  # one vector of the width for every token
    logits = tokens * vocabulary * LOGIT_BYTES
    scores = batch.samples * model.heads * model.context**2 * batch.item_bytes
    drops = model.dropout > 0
    plain = drops and batch.device == "cpu"  # attention there is ordinary products and a softmax
    dense = scores if plain else 0
    mask = tokens * width if drops and not plain else 0  # one byte each on a GPU; on a CPU as wide as what it drops
    own = _per_block(vector, dense, mask, 4 * tokens * model.heads, plain)
    kinds = block_kinds(batch.checkpointing, model.layers)
    kept = sum(own[kind] for kind in kinds) + (3 if plain else 2) * vector + mask + logits + 16 * tokens
    block_weight, table = 4 * width**2 * batch.item_bytes, vocabulary * width * batch.item_bytes
    head = max(2 * logits, table + vector - logits + tokens * vocabulary * batch.item_bytes)
    waiting = table if model.tied else 0  # the head's part of the gradient waits for the embedding's
    last = {
        "none": 3 * vector + block_weight,
        "full": max((20 if plain else 18) * vector + 3 * dense + 2 * mask + block_weight, 5 * vector + 4 * dense),
        "selective": max((14 if plain else 13) * vector + 2 * dense + 2 * mask + block_weight, 8 * vector + 3 * dense),
    }[kinds[-1]]
    ending = vector + 3 * waiting
    return max(kept + max(head, last + waiting - logits), ending)


def _per_block(vector: int, dense: int, mask: int, sums: int, plain: bool) -> dict[str, int]:
    """Bytes that a block keeps for backward, by how it is checkpointed."""
    rest = 0 if plain else sums
    return {
        "none": (18 if plain else 16) * vector + 3 * dense + 2 * mask + rest,
        "full": vector,
        "selective": 6 * vector + dense + rest,
    }


def block_kinds(checkpointing: str, layers: int) -> list[str]:
    """How each block is checkpointed: none, full or selective. A list of one block is no unit."""
    return [_kind(checkpointing, layer) for layer in range(layers)] if layers > 1 else ["none"]


def _kind(checkpointing: str, layer: int) -> str:
    name, _, number = checkpointing.partition(":")
    if name == "every":
        return "full" if layer % int(number) == 0 else "none"
    return name


def mlp_activations(widths: Sequence[int], batch: Batch) -> int:
    """Peak bytes of an MLP of these widths, inputs first. Recomputing a linear layer frees nothing."""
    vectors = [batch.samples * width * batch.item_bytes for width in widths]
    logits = batch.samples * widths[-1] * LOGIT_BYTES
    selective = batch.checkpointing == "selective"
    kept = [
        size if selective and _alike(*pair) else 0 for size, pair in zip(vectors[1:], pairwise(widths), strict=True)
    ]
    products = sum(kept)  # beside what each ReLU keeps
    live = sum(vectors[1:-1]) + products  # what each ReLU keeps
    peak = live + 3 * logits
    for number in range(len(widths) - 2, -1, -1):  # backward of the layer from widths[number] to the next
        inner = vectors[number] if number else 0  # the gradient that goes on down; none to the inputs
        weight = widths[number] * widths[number + 1] * batch.item_bytes
        peak = max(peak, live + vectors[number + 1] + inner + max(weight, inner))
        live -= inner + kept[number]  # its ReLU's own is free
    return peak


def _alike(k: int, n: int) -> bool:
    """Whether selective checkpointing keeps the product with a (k, n) weight (`zero_engine/activations.py`)."""
    return n < 4 * k and k < 4 * n
