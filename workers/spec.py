"""The job spec: what a person asks for, validated once, at the edge.

Every field of the reference page is a field of these models; an unknown field is an error. The models are frozen and strict:
no text is read as a number and no float as an integer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1, le=2**53)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, le=1e30, allow_inf_nan=False)]


class SpecModel(BaseModel):
    """Base of every part of a spec: frozen, strict, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class GptModel(SpecModel):
    """GPT-2 shaped: learned positions, LayerNorm 1e-5, biases, erf GELU. The vocabulary comes from the data."""

    kind: Literal["gpt"]
    layers: Positive = 6
    hidden: Positive = 256
    heads: Positive = 8
    context: Annotated[int, Field(ge=2, le=2**20, description="tokens per sequence")] = 256
    dropout: Fraction = 0.0
    tied: bool = Field(True, description="the output projection shares the token embedding")

    @model_validator(mode="after")
    def heads_divide_hidden(self) -> Self:
        if self.hidden % self.heads:
            nearest = [h for h in range(1, self.hidden + 1) if self.hidden % h == 0]
            best = min(nearest, key=lambda h: abs(h - self.heads))
            raise ValueError(f"hidden {self.hidden} is not divisible by heads {self.heads}; the nearest valid heads is {best}")
        return self


class MlpModel(SpecModel):
    """A multi-layer perceptron with ReLU between linear layers; input and output width come from the data."""

    kind: Literal["mlp"]
    hidden: Annotated[list[Positive], Field(min_length=1, max_length=1000)] = [128, 64, 32]


class PythonModel(SpecModel):
    """The user's own nn.Module, imported in rank processes only."""

    kind: Literal["python"]
    entry: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="module:function that returns an nn.Module")]
    path: Annotated[str, Field(min_length=1, description="folder that holds the module")]
    kwargs: dict[str, Any] = {}


class CharTokenizer(SpecModel):
    """One token per byte: needs no training; vocabulary 256."""

    kind: Literal["bytes"]


class BpeTokenizer(SpecModel):
    """Byte-level BPE trained on the text itself."""

    kind: Literal["bpe"]
    vocab: Annotated[int, Field(ge=257, le=2**20)] = 4096


class TextData(SpecModel):
    """Text: `stdlib` (the running Python's standard library), a text file, or a folder of text files."""

    kind: Literal["text"]
    path: Annotated[str, Field(min_length=1)] = "stdlib"
    tokenizer: Annotated[BpeTokenizer | CharTokenizer, Field(discriminator="kind")] = BpeTokenizer(kind="bpe")


class TokensData(SpecModel):
    """Token ids in a memory-mapped file; its dtype and vocabulary stand in a side file."""

    kind: Literal["tokens"]
    path: Annotated[str, Field(min_length=1)]
    validation: Annotated[str, Field(min_length=1)] | None = None


class DigitsData(SpecModel):
    """scikit-learn's bundled 8x8 images of digits: 64 inputs, 10 classes."""

    kind: Literal["digits"]


class AdamWSpec(SpecModel):
    """AdamW (Loshchilov and Hutter 2019); no weight decay on norms and biases."""

    kind: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0.0, le=1e3, allow_inf_nan=False)] = 3.0e-4
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    weight_decay: NonNegative = 0.1


class CosineSchedule(SpecModel):
    """Linear warm-up to `lr`, then a cosine down to `min_lr` at the last step."""

    kind: Literal["cosine"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0, le=2**53)] = 30
    min_lr: NonNegative = 3.0e-5


class ConstantSchedule(SpecModel):
    """The optimizer's `lr` at every step."""

    kind: Literal["constant"]


class EvalSpec(SpecModel):
    """Evaluation before the first step, every `every` steps and after the last step; `every: 0` turns it off."""

    every: Annotated[int, Field(ge=0, le=2**53)] = 50
    batches: Positive = 8


class TrainSpec(SpecModel):
    """How long and with what arithmetic. V = global_batch / micro_batch."""

    steps: Positive
    global_batch: Annotated[int, Field(ge=1, le=2**31, description="sequences per optimizer step")] = 16
    micro_batch: Annotated[int, Field(ge=1, le=2**31, description="sequences per forward and backward")] = 4
    chunk: Literal["auto"] | Positive = Field("auto", description="micro-batches summed before they travel (C)")
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    optimizer: AdamWSpec = AdamWSpec()
    schedule: Annotated[CosineSchedule | ConstantSchedule, Field(discriminator="kind")] = CosineSchedule()
    gradient_clipping: NonNegative = 1.0
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 1
    deterministic: bool = True
    eval: EvalSpec = EvalSpec()

    @property
    def micro_batches(self) -> int:
        """V, the number of micro-batches of a step over the whole job."""
        return self.global_batch // self.micro_batch

    @model_validator(mode="after")
    def micro_batch_divides_global_batch(self) -> Self:
        if self.global_batch % self.micro_batch:
            below = max(self.global_batch // self.micro_batch, 1) * self.micro_batch
            raise ValueError(
                f"global_batch {self.global_batch} is not divisible by micro_batch {self.micro_batch}; "
                f"the nearest valid global_batch values are {below} and {below + self.micro_batch}"
            )
        return self


class ZeroSpec(SpecModel):
    """ZeRO stage (Rajbhandari et al. 2020) and its options."""

    stage: Literal["auto", 0, 1, 2, 3] = "auto"
    offload: Literal["none", "optimizer"] = "none"
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    self_test: bool = False


class ResourceSpec(SpecModel):
    """Ranks and the device of each."""

    ranks: Annotated[int, Field(ge=1, le=65536)] = 2
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads_per_rank: Annotated[int, Field(ge=1, le=1024)] = 1


class CheckpointSpec(SpecModel):
    """When to save and what to keep; there is always one after the last step."""

    every: Annotated[int, Field(ge=0, le=2**53, description="steps; 0: only after the last step")] = 50
    keep_latest: Annotated[int, Field(ge=2, le=10**6)] = 2
    keep_best: Annotated[int, Field(ge=0, le=10**6)] = 0


class RestartSpec(SpecModel):
    """How many failures of each class are retried."""

    user_failures: Annotated[int, Field(ge=0, le=10**6)] = 0
    infrastructure_failures: Annotated[int, Field(ge=0, le=10**6)] = 10


ModelSpec = Annotated[GptModel | MlpModel | PythonModel, Field(discriminator="kind")]
DataSpec = Annotated[TextData | TokensData | DigitsData, Field(discriminator="kind")]


class JobSpec(SpecModel):
    """A whole job spec; see `docs/job-spec.md`, generated from these models."""

    name: Annotated[str, Field(min_length=1, max_length=200, description="free text in any script; never a path")]
    tags: Annotated[list[Annotated[str, Field(min_length=1, max_length=100)]], Field(max_length=50)] = []
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    zero: ZeroSpec = ZeroSpec()
    resources: ResourceSpec = ResourceSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    restart: RestartSpec = RestartSpec()
    priority: Annotated[int, Field(ge=0, le=100)] = 50
    stop_grace_seconds: Annotated[float, Field(ge=0.0, le=86400.0, allow_inf_nan=False)] = 30.0

    @model_validator(mode="after")
    def ranks_have_micro_batches(self) -> Self:
        micro_batches, ranks = self.train.micro_batches, self.resources.ranks
        if ranks > micro_batches:
            raise ValueError(
                f"resources.ranks {ranks} is more than the {micro_batches} micro-batches of a step "
                f"(global_batch {self.train.global_batch} / micro_batch {self.train.micro_batch}); "
                f"use ranks {micro_batches} or global_batch {ranks * self.train.micro_batch}"
            )
        return self

    @property
    def chunk(self) -> int:
        """C as a number: `auto` is ceil(V / ranks) of this spec as submitted."""
        if self.train.chunk != "auto":
            return self.train.chunk
        return -(-self.train.micro_batches // self.resources.ranks)
