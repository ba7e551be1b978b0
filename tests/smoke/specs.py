"""The job that the smoke tests submit."""

from __future__ import annotations

DIGITS = """
name: {name}
model: {{kind: mlp, hidden: [32, 16]}}
data: {{kind: digits}}
train:
  steps: {steps}
  global_batch: 32
  micro_batch: 8
  optimizer: {{lr: 3.0e-3}}
  schedule: {{kind: constant}}
  eval: {{every: 10}}
zero: {{stage: {stage}}}
resources: {{ranks: {ranks}}}
checkpoint: {{every: 10}}
"""


def digits_spec(name: str, steps: int = 30, ranks: int = 2, stage: int = 2) -> str:
    """A job of a few seconds: an MLP on scikit-learn's digits."""
    return DIGITS.format(name=name, steps=steps, ranks=ranks, stage=stage)
