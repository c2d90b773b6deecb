"""Lower bounds against every assignment of small rows, and by hand.

Run: python -m pytest tests/sharding/test_bounds.py
"""

from itertools import product

import numpy as np
import pytest

from mmcp.sequence import Segment, TokenSequence
from mmcp.sharding.balance import balance
from mmcp.sharding.bounds import EVEN_ENOUGH, busiest, lower_bounds, whole_groups
from mmcp.sharding.cost import row_costs
from mmcp.sharding.strategies import STRATEGIES
from tests.sharding.rows import MODEL, media_units
from tests.sharding.test_assign import FRAME_NS, small_row


def test_indivisible_items():
    assert busiest(np.array([4, 4, 4]), 12, 2) == 8
    assert busiest(np.array([9, 1, 1]), 11, 4) == 9
    assert busiest(np.array([1, 1, 1, 1]), 4, 2) == 2
    assert busiest(np.array([3, 3, 3, 3, 3]), 15, 3) == 6
    assert busiest(np.zeros(0, dtype=np.int64), 10, 4) == 3


@pytest.mark.parametrize("seed", range(30))
def test_no_partition_beats_the_bound(seed):
    draw = np.random.default_rng(seed)
    items, ranks = draw.integers(1, 20, int(draw.integers(1, 7))), int(draw.integers(1, 4))
    best = min(
        np.bincount(owners, weights=items, minlength=ranks).max() for owners in product(range(ranks), repeat=len(items))
    )
    assert busiest(items, int(items.sum()), ranks) <= best


def test_a_group_of_pictures_is_as_dear_as_its_last_unit():
    clip = Segment(kind="video", source="a", units=media_units("video", 5, group=2))  # keys at 0, 6, 12; shown 0, 3, ..
    costs = row_costs(TokenSequence((clip,)), MODEL)
    assert ((whole_groups(costs) - costs.output_ns[0]) // FRAME_NS).tolist() == [4, 4, 1]


@pytest.mark.parametrize("seed", range(60))
def test_no_assignment_of_a_small_row_beats_the_bounds(seed):
    draw = np.random.default_rng(seed)
    (sequence, model), ranks = small_row(draw), int(draw.integers(2, 4))
    costs = row_costs(sequence, model)
    if costs.num_units > 6:
        pytest.skip("too many assignments to try")
    bounds, units = lower_bounds(costs, (1, ranks)), np.arange(costs.num_units)
    allowed = max(bounds.encoder_flops, -(-int(costs.flops.sum()) // ranks)) * EVEN_ENOUGH[0] / EVEN_ENOUGH[1]
    for owners in product(range(ranks), repeat=costs.num_units):
        owners = np.array(owners, dtype=np.int64)
        decode, frames = costs.decoding(units, owners, ranks)
        flops, resident = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
        np.add.at(flops, owners, costs.flops)
        np.add.at(resident, owners, costs.bytes)
        assert decode.max() >= bounds.decode_ns and flops.max() >= bounds.encoder_flops
        if flops.max() <= allowed:
            assert frames.sum() >= bounds.frames


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize("mesh", [(1, 3), (3, 1), (2, 2)])
def test_no_plan_beats_the_bounds(name, mesh):
    for seed in range(20):
        sequence, model = small_row(np.random.default_rng(seed))
        costs = row_costs(sequence, model)
        bounds = lower_bounds(costs, mesh)
        plan = STRATEGIES[name](sequence, mesh, costs)
        result = balance(sequence, plan, costs)
        assert bounds.makespan <= result.makespan_ratio * (1 + 1e-12)
        most = -(-costs.num_tokens // plan.ranks) * EVEN_ENOUGH[0] // EVEN_ENOUGH[1]
        for cost, bound in bounds.ratios.items():
            if cost == "memory" and max(plan.lengths) > most:
                continue
            assert bound <= result.imbalance[cost] * (1 + 1e-12), (seed, cost)


def test_frames_of_a_long_group_on_many_ranks():
    """One group of 12 equal units, each 3 frames after the one before: 4 ranks decode 34, 25, 16 and 7 frames."""
    clip = Segment(kind="video", source="a", units=media_units("video", 12, group=12))
    costs = row_costs(TokenSequence((clip,)), MODEL)
    assert lower_bounds(costs, (1, 4)).frames == 34 + 25 + 16 + 7
