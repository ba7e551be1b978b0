"""The dynamic loss scale of fp16: a pure state machine, one decision for all ranks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace

FLOOR = 1.0


@dataclass(frozen=True)
class LossScale:
    """What losses are multiplied by before backward. Powers of two, so that scaling rounds nothing."""

    scale: float  # 1 and constant for fp32 and bf16
    growth_steps: int  # finite steps in a row after which it doubles; 0: never
    finite_steps: int = 0

    def after(self, finite: bool) -> LossScale:
        """The scale of the next step: halved after an overflow, doubled after enough finite steps."""
        if self.growth_steps == 0:
            return self
        if not finite:
            return replace(self, scale=max(self.scale / 2, FLOOR), finite_steps=0)
        if self.finite_steps + 1 == self.growth_steps:
            return replace(self, scale=self.scale * 2, finite_steps=0)
        return replace(self, finite_steps=self.finite_steps + 1)

    @property
    def exhausted(self) -> bool:
        """Whether an overflow now cannot be helped by a smaller scale."""
        return self.growth_steps > 0 and self.scale <= FLOOR


def loss_scale_of(precision: str, scale: float, growth_steps: int) -> LossScale:
    """The first step's scale."""
    return LossScale(scale, growth_steps) if precision == "fp16" else LossScale(1.0, 0)
