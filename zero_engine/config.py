"""What a user chooses: one frozen value, checked at the edge, the same on every rank. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from types import UnionType

from zero_engine.errors import ConfigError

STAGES = (0, 1, 2, 3)
COMPUTE_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class ZeroConfig:
    """How to shard and how to sum.

    `micro_batches` (V) and `chunk` (C) fix the order of the gradient sum and with it the bits; `stage`, the number of
    ranks, `transport`, `reducer` and `bucket_bytes` never change a bit. None means derived from the group size by
    `resolved`.
    """

    stage: int = 0
    micro_batches: int | None = None  # V, micro-batches per optimizer step over all ranks
    chunk: int | None = None  # C, micro-batches summed before they travel
    precision: str = "fp32"  # fp32 | bf16 | fp16: dtype of compute weights; masters and sums are always fp32
    gradient_clipping: float = 0.0  # largest global gradient norm; 0 is off
    clip_norm: float = 2.0  # order of that norm: 1, 2 or math.inf
    units: tuple[type | str, ...] = ()  # module classes or names; () derives them from the longest list of one class
    seed: int = 1
    transport: str = "auto"  # auto | group | shared: how bulk bytes travel between ranks
    bucket_bytes: int = 4 << 20  # most bytes of one gradient exchange message
    buffers: str = "refuse"  # refuse | local: what to do when training forward changes a buffer and N > 1
    broadcast: bool = False  # send rank 0's initial weights instead of refusing different ones
    activation_checkpointing: str = "none"  # none | full | selective | every:k (each k-th unit)
    offload: str = "none"  # none | cpu: masters, moments and the update in pinned host memory
    loss_scale: float = 65536.0  # fp16: the first step's; a power of two
    loss_scale_growth: int = 2000  # fp16: finite steps in a row after which the scale doubles
    non_finite: str = "skip"  # skip | stop: what a loss or gradient that is not finite does to a step
    reducer: str = "scatter"  # scatter | naive: naive gives all sums to all ranks, which then keep a slice; to compare

    def __post_init__(self) -> None:
        _one_of("stage", self.stage, STAGES)
        _one_of("precision", self.precision, tuple(COMPUTE_DTYPES))
        _one_of("transport", self.transport, ("auto", "group", "shared"))
        _one_of("offload", self.offload, ("none", "cpu"))
        _one_of("buffers", self.buffers, ("refuse", "local"))
        _one_of("reducer", self.reducer, ("scatter", "naive"))
        _one_of("non_finite", self.non_finite, ("skip", "stop"))
        _one_of("clip_norm", self.clip_norm, (1.0, 2.0, math.inf))
        _at_least("bucket_bytes", self.bucket_bytes, 4096)
        _at_least("loss_scale_growth", self.loss_scale_growth, 1)
        _of_kind("broadcast", self.broadcast, bool, "True or False")
        _of_kind("seed", self.seed, int, "a whole number")
        _of_kind("loss_scale", self.loss_scale, Real, "a number")
        _of_kind("gradient_clipping", self.gradient_clipping, Real, "a number; 0 is off")
        _of_kind("activation_checkpointing", self.activation_checkpointing, str, "none, full, selective or every:2")
        _of_kind(
            "units", self.units, tuple | list, "a tuple of module classes or names, such as (Block,) or ('blocks.0',)"
        )
        if not (self.loss_scale >= 1 and math.log2(self.loss_scale).is_integer()):
            raise ConfigError(f"loss_scale is {self.loss_scale}; use a power of two of at least 1, such as 65536")
        kind, _, number = self.activation_checkpointing.partition(":")
        if kind != "every" or not number.isdigit() or int(number) < 1:
            _one_of("activation_checkpointing", self.activation_checkpointing, ("none", "full", "selective", "every:2"))
        for name, value in (("micro_batches", self.micro_batches), ("chunk", self.chunk)):
            if value is not None:
                _at_least(name, value, 1)
        if not (math.isfinite(self.gradient_clipping) and self.gradient_clipping >= 0):
            raise ConfigError(f"gradient_clipping is {self.gradient_clipping}; use 0 (off) or a positive number")

    @property
    def compute_dtype(self) -> str:
        """Dtype name of compute weights and gradient leaves: float32, bfloat16 or float16."""
        return COMPUTE_DTYPES[self.precision]

    def resolved(self, ranks: int) -> ZeroConfig:
        """The same choice with V and C as numbers. Raises ConfigError when there are more ranks than micro-batches."""
        micro_batches = ranks if self.micro_batches is None else self.micro_batches
        if ranks > micro_batches:
            raise ConfigError(
                f"{ranks} ranks need at least {ranks} micro-batches per step, but micro_batches is {micro_batches}; "
                f"use at most {micro_batches} ranks or micro_batches={ranks}"
            )
        chunk = -(-micro_batches // ranks) if self.chunk is None else min(self.chunk, micro_batches)
        return replace(self, micro_batches=micro_batches, chunk=chunk)

    @property
    def batch_shape(self) -> tuple[int, int]:
        """(V, C) of a resolved config."""
        assert self.micro_batches is not None and self.chunk is not None, "resolve the config first"
        return self.micro_batches, self.chunk


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; use one of {', '.join(map(str, allowed))}")


def _of_kind(name: str, value: object, kind: type | UnionType, words: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} is {value!r}; use {words}")


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}; use a whole number of at least {least}")
