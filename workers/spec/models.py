"""The fields of a job spec, validated once, at the edge; those of models and data stand in `kinds.py`.

Every field of the reference page (`docs/job-spec.md`, generated from both) is a field of theirs; an unknown one is an
error. The models are frozen and strict: no text is read as a number and no float as an integer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from workers.spec.kinds import DataSpec, ModelSpec
from workers.spec.optimizers import AdamWSpec, OptimizerSpec
from workers.spec.part import NonNegative, Positive, SpecModel, wrong


def _not_a_flag(value: Any) -> Any:
    """Python takes True for 1 and 2.0 for 2; a spec does not."""
    if isinstance(value, bool | float):
        raise PydanticCustomError("spec_type", "must be auto or one of the whole numbers 0, 1, 2, 3")
    return value


def _two_at_least(value: int) -> int:
    if value < 2:
        raise PydanticCustomError(
            "spec", "keep_latest {value} is below 2, the fewest that survive a damaged file; use 2", {"value": value}
        )
    return value


def _not_blank(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("blank", "must not be blank")
    return value


class CosineSchedule(SpecModel):
    """Linear warm-up to `lr`, then a cosine down to `min_lr` at the last step."""

    kind: Literal["cosine"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0, le=2**53, description="linear from lr / warmup_steps to lr")] = 30
    min_lr: Annotated[NonNegative, Field(description="learning rate of the last step")] = 3.0e-5


class ConstantSchedule(SpecModel):
    """The optimizer's `lr` at every step."""

    kind: Literal["constant"]


class EvalSpec(SpecModel):
    """Evaluation before the first step, every `every` steps and after the last step; `every: 0` turns it off."""

    every: Annotated[int, Field(ge=0, le=2**53, description="steps; 0: no evaluation")] = 50
    batches: Annotated[Positive, Field(description="micro-batches of the validation set")] = 8


class TrainSpec(SpecModel):
    """How long and with what arithmetic. V = global_batch / micro_batch."""

    steps: Annotated[Positive, Field(description="optimizer steps of the whole job")]
    global_batch: Annotated[int, Field(ge=1, le=2**31, description="sequences per optimizer step")] = 16
    micro_batch: Annotated[int, Field(ge=1, le=2**31, description="sequences per forward and backward")] = 4
    chunk: Annotated[
        Literal["auto"] | Positive, Field(description="micro-batches summed before they travel; auto: ceil(V / ranks)")
    ] = "auto"
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"],
        Field(description="of compute; master weights and sums are fp32"),
    ] = "fp32"
    optimizer: OptimizerSpec = AdamWSpec()
    schedule: Annotated[CosineSchedule | ConstantSchedule, Field(discriminator="kind")] = CosineSchedule()
    gradient_clipping: Annotated[NonNegative, Field(description="largest 2-norm of the gradient; 0: off")] = 1.0
    seed: Annotated[int, Field(ge=0, le=2**63 - 1, description="of weights, dropout and the order of samples")] = 1
    deterministic: Annotated[bool, Field(description="CUDA: deterministic kernels")] = True
    eval: EvalSpec = EvalSpec()

    @property
    def micro_batches(self) -> int:
        """V, the number of micro-batches of a step over the whole job."""
        return self.global_batch // self.micro_batch

    @field_validator("optimizer", mode="before")
    @classmethod
    def an_optimizer_without_kind_is_adamw(cls, value: Any) -> Any:
        return {"kind": "adamw", **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def micro_batch_divides_global_batch(self) -> Self:
        if self.global_batch % self.micro_batch:
            below = max(self.global_batch // self.micro_batch, 1) * self.micro_batch
            nearest = sorted({below, (self.global_batch // self.micro_batch + 1) * self.micro_batch})
            raise wrong(
                "/train/global_batch",
                f"global_batch {self.global_batch} is not divisible by micro_batch {self.micro_batch}; "
                f"the nearest valid global_batch is {' or '.join(map(str, nearest))}",
            )
        return self

    @model_validator(mode="after")
    def schedule_ends_below_its_peak(self) -> Self:
        if isinstance(self.schedule, CosineSchedule) and self.schedule.min_lr > self.optimizer.lr:
            raise wrong(
                "/train/schedule/min_lr",
                f"min_lr {self.schedule.min_lr} is above lr {self.optimizer.lr}; use at most {self.optimizer.lr}",
            )
        return self


class ZeroSpec(SpecModel):
    """ZeRO stage (Rajbhandari et al. 2020) and its options."""

    stage: Annotated[
        Literal["auto", 0, 1, 2, 3],
        BeforeValidator(_not_a_flag),
        Field(
            description="1 shards optimizer state, 2 also gradients, 3 also parameters; auto: least traffic that fits"
        ),
    ] = "auto"
    offload: Annotated[
        Literal["none", "optimizer"], Field(description="keeps master weights, moments and the update in host memory")
    ] = "none"
    activation_checkpointing: Annotated[
        Literal["none", "full", "selective"],
        Field(description="recomputes activations in backward"),
    ] = "none"
    buffers: Annotated[
        Literal["refuse", "local"],
        Field(
            description="a buffer that training changes (BatchNorm), on several ranks: an error that names it, or each "
            "rank keeps its own, which gives up equal bits"
        ),
    ] = "refuse"
    self_test: Annotated[
        bool, Field(description="two steps are compared bit for bit with the plain loop before step 1")
    ] = False


class ResourceSpec(SpecModel):
    """Ranks and the device of each."""

    ranks: Annotated[
        int, Field(ge=1, le=65536, description="processes of the group; at most the micro-batches of a step")
    ] = 2
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="auto: cuda where there is one")] = "auto"
    threads_per_rank: Annotated[int, Field(ge=1, le=1024, description="CPU threads of each rank; part of the bits")] = 1


class CheckpointSpec(SpecModel):
    """When to save and what to keep; there is always one after the last step."""

    every: Annotated[int, Field(ge=0, le=2**53, description="steps; 0: only after the last step")] = 50
    keep_latest: Annotated[
        int, AfterValidator(_two_at_least), Field(le=10**6, description="newest checkpoints kept; at least 2")
    ] = 2
    keep_best: Annotated[
        int,
        Field(
            ge=0,
            le=10**6,
            description="the so many best by validation loss stay too, however old; the newest may be among them. "
            "The loss is then measured at each save",
        ),
    ] = 0
    keep_every: Annotated[
        int, Field(ge=0, le=2**53, description="kept for good: those whose step is a multiple of it; 0: none")
    ] = 0
    when_busy: Annotated[
        Literal["wait", "skip"],
        Field(
            description="a save is due while the one before still runs: training waits for it, or this one is skipped"
        ),
    ] = "wait"
    when_failed: Annotated[
        Literal["continue", "stop"],
        Field(description="a save beside training failed: training goes on, or the attempt fails within a step"),
    ] = "continue"


class RestartSpec(SpecModel):
    """How many failures of each class are retried."""

    user_failures: Annotated[int, Field(ge=0, le=10**6, description="exceptions in the user's code")] = 0
    infrastructure_failures: Annotated[
        int, Field(ge=0, le=10**6, description="lost nodes, ranks killed from outside")
    ] = 10


class JobSpec(SpecModel):
    """A whole job spec; see `docs/job-spec.md`, generated from these models."""

    name: Annotated[
        str,
        AfterValidator(_not_blank),
        Field(min_length=1, max_length=200, description="free text in any script; never a path"),
    ]
    tags: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=100)]],
        Field(max_length=50, description="free words to filter by"),
    ] = []
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    zero: ZeroSpec = ZeroSpec()
    resources: ResourceSpec = ResourceSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    restart: RestartSpec = RestartSpec()
    priority: Annotated[int, Field(ge=0, le=100, description="higher first")] = 50
    stop_grace_seconds: Annotated[
        float,
        Field(
            ge=0.0,
            le=86400.0,
            allow_inf_nan=False,
            description="to reach the next step boundary; then a stop is a kill",
        ),
    ] = 30.0

    @model_validator(mode="after")
    def ranks_have_micro_batches(self) -> Self:
        micro_batches, ranks = self.train.micro_batches, self.resources.ranks
        if ranks > micro_batches:
            raise wrong(
                "/resources/ranks",
                f"ranks {ranks} is more than the {micro_batches} micro-batches of a step "
                f"(global_batch {self.train.global_batch} / micro_batch {self.train.micro_batch}); "
                f"use ranks {micro_batches} or global_batch {ranks * self.train.micro_batch}",
            )
        return self

    @model_validator(mode="after")
    def the_best_are_measured(self) -> Self:
        if self.checkpoint.keep_best and not self.train.eval.every:
            raise wrong(
                "/checkpoint/keep_best",
                f"keep_best {self.checkpoint.keep_best} goes by validation loss, and train.eval.every 0 turns it off; "
                "set train.eval.every, or keep_best 0",
            )
        return self

    @model_validator(mode="after")
    def model_fits_data(self) -> Self:
        fitting = {"gpt": ("text", "tokens"), "mlp": ("digits",)}.get(self.model.kind)
        if fitting and self.data.kind not in fitting:
            raise wrong(
                "/data/kind", f"model {self.model.kind} cannot read data {self.data.kind}; use {' or '.join(fitting)}"
            )
        return self

    @property
    def counts(self) -> Literal["tokens", "samples"]:
        """What a step's amount of data is counted in."""
        return "samples" if self.data.kind == "digits" else "tokens"

    @property
    def chunk(self) -> int:
        """C as a number: `auto` is ceil(V / ranks) of this spec as submitted."""
        if self.train.chunk != "auto":
            return self.train.chunk
        return -(-self.train.micro_batches // self.resources.ranks)
