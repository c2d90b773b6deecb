"""The order of samples: a permutation each epoch, the same however it is taken, resumed from a few integers.

python -m pytest tests/data_pipelines/test_sampler.py
"""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines.sampler import Order, OrderState, permutation


@given(st.integers(0, 2**32), st.integers(1, 50), st.lists(st.integers(0, 40), max_size=8))
def test_every_sample_once_an_epoch_however_it_is_taken(seed, num_samples, counts):
    order = Order(seed, num_samples)
    taken = [number for count in counts for number in order.take(count)]
    assert taken == Order(seed, num_samples).take(sum(counts))
    for start in range(0, len(taken) - num_samples + 1, num_samples):
        assert sorted(taken[start : start + num_samples]) == list(range(num_samples))


@given(st.integers(0, 9), st.integers(1, 20), st.integers(0, 60), st.integers(0, 60))
def test_a_resume_goes_on_where_it_stopped(seed, num_samples, before, after):
    order = Order(seed, num_samples)
    order.take(before)
    resumed = Order(seed, num_samples)
    resumed.restore(OrderState(**dataclasses.asdict(order.state)))
    assert resumed.take(after) == order.take(after)


def test_epochs_and_seeds_differ():
    orders = {tuple(permutation(seed, epoch, 100).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_order_is_pinned():
    assert Order(3, 5).take(10) == [1, 2, 4, 3, 0, 3, 4, 0, 2, 1]


def test_another_data_set_is_refused():
    with pytest.raises(ValueError, match="has seed 0 and 5 samples, this run has seed 0 and 6"):
        Order(0, 6).restore(Order(0, 5).state)
    with pytest.raises(ValueError, match="nothing to order"):
        Order(0, 0)
