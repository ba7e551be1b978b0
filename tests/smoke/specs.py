"""One service for all smoke tests, and the job they submit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.running_service import Service, start, stop

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


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service of this session; how one ends is tested on services of their own."""
    running = start(tmp_path_factory.mktemp("service"))
    yield running
    stop(running)
