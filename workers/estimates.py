"""What one micro-batch holds and computes, and how that is known. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from workers.activation_bytes import Batch, gpt_activations, mlp_activations
from workers.spec import GptModel, JobSpec, MlpModel
from workers.step_time import gpt_attention_flops, gpt_flops, mlp_flops

FROM_SHAPES = "from the model's shapes, held to a pass on tensors without contents"
FROM_PASS = "one forward and backward on tensors without contents"


@dataclass(frozen=True)
class Estimate:
    """One micro-batch on one rank."""

    activation_bytes: int | None  # at the peak, beside what the engine owns; None: not known
    flops: int | None  # forward, backward and recomputation
    source: str  # how it was found, or why it was not
    attention_flops: int = 0  # those that are attention's


UNKNOWN = Estimate(None, None, "a user's model is not known before it is built")


def estimate_of(spec: JobSpec, vocabulary: int | None, device: str) -> Estimate:
    """From shapes, for our models; `vocabulary` where there are tokens."""
    samples, checkpointing = spec.train.micro_batch, spec.zero.activation_checkpointing
    batch = Batch(samples, 4 if spec.train.precision == "fp32" else 2, checkpointing, device)
    match spec.model:
        case GptModel() as model if vocabulary is not None:
            flops = gpt_flops(model, vocabulary, samples, checkpointing)
            attention = 0 if _plain(model, device) else gpt_attention_flops(model, samples, checkpointing)
            return Estimate(gpt_activations(model, vocabulary, batch), flops, FROM_SHAPES, attention)
        case MlpModel(hidden=hidden):
            from workers.data.digits import CLASSES, INPUTS

            widths = [INPUTS, *hidden, CLASSES]
            return Estimate(mlp_activations(widths, batch), mlp_flops(widths, samples), FROM_SHAPES)
        case _:
            return UNKNOWN


def _plain(model: GptModel, device: str) -> bool:
    """Whether attention is ordinary products: with dropout on a CPU."""
    return model.dropout > 0 and device == "cpu"
