"""Rows dealt to groups: each once, equal counts, and a step as short as the best deal found by brute force.

Run: python -m pytest tests/sharding/test_deal.py
"""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcp.sharding.deal import deal


def step_cost(costs, micro_batches):
    """Sum over micro-batches of the dearest row: groups wait for each other in each."""
    return sum(max(costs[row] if row is not None else 0 for row in rows) for rows in micro_batches)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 9), max_size=5), st.integers(1, 3))
def test_each_row_once_and_the_least_step(costs, groups):
    dealt = deal(costs, groups)
    assert sorted(row for group in dealt for row in group if row is not None) == list(range(len(costs)))
    assert {len(group) for group in dealt} == {-(-len(costs) // groups)}
    slots = [*range(len(costs)), *[None] * (-len(costs) % groups)]
    best = min(
        step_cost(costs, [order[i : i + groups] for i in range(0, len(order), groups)]) for order in permutations(slots)
    )
    assert step_cost(costs, zip(*dealt, strict=True)) == best


def test_groups_end_up_even():
    assert deal([3, 3, 3, 3], 2) == [[0, 2], [1, 3]]
    assert deal([5, 1, 4, 2, 3], 2) == [[0, 3, 1], [2, 4, None]]
    assert deal([], 2) == [[], []]


def test_no_group_is_refused():
    with pytest.raises(ValueError, match="use at least 1"):
        deal([1], 0)
