"""Which sample comes when: a pure function of (seed, sample number), so a resume on any ranks goes on exactly.

Note: a permutation without state
A pass over n samples visits each once. The order is a Feistel network on the smallest even number of bits that holds
n, walked until the result is below n (cycle walking, Black and Rogaway 2002): a bijection of [0, n) that needs no
memory and answers any position at once. Every pass has a key of its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
Indices = NDArray[np.uint64]


def sample_indices(seed: int, first: int, count: int, num_samples: int) -> list[int]:
    """Dataset indices of the samples numbered first .. first + count - 1 since the start of training.

    Sample s belongs to pass s // num_samples; inside a pass no index repeats.
    """
    assert num_samples > 0 and first >= 0, (first, num_samples)
    found: list[int] = []
    while len(found) < count:
        epoch, position = divmod(first + len(found), num_samples)
        length = min(count - len(found), num_samples - position)
        positions = np.arange(position, position + length, dtype=np.uint64)
        found += permuted(positions, num_samples, _key(seed, epoch)).tolist()
    return found


def permuted(positions: Indices, num_samples: int, key: int) -> Indices:
    """The image of each position under the permutation of [0, num_samples) that `key` names. Any number of samples."""
    half = np.uint64(max(1, ((num_samples - 1).bit_length() + 1) // 2))
    keys = [np.uint64(_mixed(key + number)) for number in range(_ROUNDS)]
    values = _network(positions, half, keys)
    outside = values >= num_samples
    while outside.any():
        values[outside] = _network(values[outside], half, keys)
        outside = values >= num_samples
    return values


def _network(values: Indices, half: np.uint64, keys: list[np.uint64]) -> Indices:
    mask = np.uint64((1 << int(half)) - 1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_scrambled(right ^ key) & mask)
    return (left << half) | right


def _scrambled(values: Indices) -> Indices:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014), element by element, modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _key(seed: int, epoch: int) -> int:
    return _mixed(_mixed(seed) + epoch)


def _mixed(value: int) -> int:
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
