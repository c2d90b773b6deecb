"""The order of samples: a permutation each epoch, the same however it is taken, resumed from a few integers.

python -m pytest tests/data_pipelines/test_sampler.py
"""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines.sampler import Order, OrderState, permutation, whole_weights


@given(st.integers(0, 2**32), st.integers(1, 50), st.lists(st.integers(0, 40), max_size=8))
def test_every_sample_once_an_epoch_however_it_is_taken(seed, num_samples, counts):
    order = Order(seed, num_samples)
    taken = [number for count in counts for number in order.take(count)]
    assert taken == Order(seed, num_samples).take(sum(counts))
    for start in range(0, len(taken) - num_samples + 1, num_samples):
        assert sorted(taken[start : start + num_samples]) == list(range(num_samples))


SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=3)


@given(st.integers(0, 9), SIZES, st.integers(0, 60), st.integers(0, 60), st.data())
def test_a_resume_goes_on_where_it_stopped(seed, sizes, before, after, data):
    weights = [data.draw(st.sampled_from([0.5, 1, 2, 2.5])) for _ in sizes]
    order = Order(seed, sizes, weights)
    order.take(before)
    resumed = Order(seed, sizes, weights)
    resumed.restore(OrderState.of(json.loads(json.dumps(dataclasses.asdict(order.state)))))
    assert resumed.take(after) == order.take(after)


@given(st.integers(0, 9), SIZES, st.integers(1, 400), st.data())
def test_sources_are_mixed_by_weight_and_each_is_permuted(seed, sizes, count, data):
    weights = [data.draw(st.sampled_from([0.5, 1, 2, 7, 0.3])) for _ in sizes]
    taken = Order(seed, sizes, weights).take(count)
    first = 0
    for i, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        own = [number - first for number in taken if first <= number < first + size]
        assert abs(len(own) - count * weight / sum(weights)) < len(sizes)
        for start in range(0, len(own) - size + 1, size):
            assert own[start : start + size] == permutation(seed, start // size, size, source=i).tolist()
        first += size


def test_unweighted_sources_are_drawn_by_their_sizes():
    taken = Order(0, [3, 9]).take(12)
    assert sorted(taken) == list(range(12))
    assert whole_weights([0.5, 0.25, 1]) == (2, 1, 4)
    with pytest.raises(ValueError, match="as uneven as"):
        whole_weights([0.123457, 1])
    with pytest.raises(ValueError, match="above 0"):
        whole_weights([0, 1])


def test_epochs_and_seeds_differ():
    orders = {tuple(permutation(seed, epoch, 100).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_order_is_pinned():
    assert Order(3, 5).take(10) == [1, 2, 4, 3, 0, 3, 4, 0, 2, 1]


def test_another_data_set_is_refused():
    with pytest.raises(ValueError, match="has seed 0, 5 samples, this run has seed 0, 6 samples"):
        Order(0, 6).restore(Order(0, 5).state)
    with pytest.raises(ValueError, match="nothing to order"):
        Order(0, 0)


def test_a_state_of_another_version_is_refused_by_its_fields():
    with pytest.raises(ValueError, match="names seed, num_samples, epoch, position but not sizes, weights, taken"):
        OrderState.of({"seed": 0, "num_samples": 10, "epoch": 1, "position": 3})
