"""The order of samples: a permutation that needs no memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.data.order import sample_indices


@settings(deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(1, 3000), st.integers(0, 5))
def test_a_pass_visits_every_sample_once(seed: int, num_samples: int, epoch: int) -> None:
    """Property: inside a pass no index repeats and none is left out, for any number of samples."""
    found = sample_indices(seed, epoch * num_samples, num_samples, num_samples)
    assert sorted(found) == list(range(num_samples))


@settings(deadline=None)
@given(st.integers(0, 2**40), st.integers(1, 50), st.integers(1, 10**12))
def test_a_window_is_the_same_however_it_is_asked_for(first: int, count: int, num_samples: int) -> None:
    """Property: the samples of a range are those of its parts, also across the end of a pass."""
    whole = sample_indices(7, first, count, num_samples)
    assert whole == [sample_indices(7, first + i, 1, num_samples)[0] for i in range(count)]
    assert all(0 <= index < num_samples for index in whole)


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    """Property: neither a second pass nor another seed repeats the order, and it is not the order of the file."""
    first, second = sample_indices(1, 0, 500, 500), sample_indices(1, 500, 500, 500)
    other = sample_indices(2, 0, 500, 500)
    orders = [first, second, other, list(range(500))]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_neighbours_in_the_file_do_not_stay_neighbours() -> None:
    """Property: the order mixes: consecutive samples are far apart on average, as in a random permutation."""
    order = np.array(sample_indices(3, 0, 10_000, 10_000))
    gap = np.abs(np.diff(order)).mean()
    assert 3000 < gap < 3700  # a random permutation of n has n / 3


def test_the_order_is_frozen() -> None:
    """Property: these numbers never change, or a resumed job would see other samples."""
    assert sample_indices(1, 0, 8, 1000) == [349, 903, 551, 560, 141, 812, 663, 563]
    assert sample_indices(2**62, 10**15, 2, 10**11) == [5219260009, 61856645359]
