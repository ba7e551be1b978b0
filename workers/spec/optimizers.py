"""The optimizers that a job spec may name; `kind` tells them apart. All of them update element by element.

`moments`: fp32 numbers that are kept for each parameter, beside its weight.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from workers.spec.part import Fraction, NonNegative, SpecModel, wrong

Rate = Annotated[float, Field(gt=0.0, le=1e3, allow_inf_nan=False, description="peak learning rate")]
Betas = Annotated[list[Fraction], Field(min_length=2, max_length=2, description="decay of the two averages")]
Decoupled = Annotated[NonNegative, Field(description="decoupled, times the learning rate; not on norms and biases")]
Coupled = Annotated[NonNegative, Field(description="added to the gradient, times the weight; not on norms and biases")]


class AdamWSpec(SpecModel):
    """AdamW (Loshchilov and Hutter 2019)."""

    kind: Literal["adamw"] = "adamw"
    lr: Rate = 3.0e-4
    betas: Betas = [0.9, 0.95]
    weight_decay: Decoupled = 0.1
    moments: ClassVar[int] = 2


class AdamSpec(SpecModel):
    """Adam (Kingma and Ba 2015)."""

    kind: Literal["adam"]
    lr: Rate = 3.0e-4
    betas: Betas = [0.9, 0.999]
    weight_decay: Coupled = 0.0
    moments: ClassVar[int] = 2


class SGDSpec(SpecModel):
    """Stochastic gradient descent, with momentum as in PyTorch; without it there is no optimizer state."""

    kind: Literal["sgd"]
    lr: Rate = 1.0e-2
    momentum: Annotated[Fraction, Field(description="decay of the running gradient; 0: none is kept")] = 0.9
    nesterov: Annotated[bool, Field(description="look ahead along the momentum")] = False
    weight_decay: Coupled = 0.0

    @model_validator(mode="after")
    def nesterov_needs_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise wrong("/train/optimizer/nesterov", "nesterov looks along the momentum; set momentum, or false")
        return self

    @property
    def moments(self) -> int:
        """The running gradient, where there is one."""
        return 1 if self.momentum else 0


class LionSpec(SpecModel):
    """Lion (Chen et al. 2023): the sign of an average, half the state of AdamW, a third of its rate or less."""

    kind: Literal["lion"]
    lr: Rate = 1.0e-4
    betas: Betas = [0.9, 0.99]
    weight_decay: Decoupled = 1.0
    moments: ClassVar[int] = 1


OptimizerSpec = Annotated[AdamWSpec | AdamSpec | SGDSpec | LionSpec, Field(discriminator="kind")]
