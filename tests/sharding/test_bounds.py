"""Lower bounds against every assignment of small rows, and by hand.

Run: python -m pytest tests/sharding/test_bounds.py
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from mmcp.sequence import Segment, TokenSequence
from mmcp.sharding.balance import balance
from mmcp.sharding.bounds import EVEN_ENOUGH, lower_bounds
from mmcp.sharding.cost import Rates, row_costs
from mmcp.sharding.joint import allowed_flops, busiest, decoding_beside_encoding, whole_groups
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
    allowed = allowed_flops(costs, ranks)
    for owners in product(range(ranks), repeat=costs.num_units):
        owners = np.array(owners, dtype=np.int64)
        decode, frames = costs.decoding(units, owners, ranks)
        flops, resident = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
        np.add.at(flops, owners, costs.flops)
        np.add.at(resident, owners, costs.bytes)
        assert flops.max() >= bounds.encoder_flops
        if flops.max() <= allowed:
            assert decode.max() >= bounds.decode_ns and frames.sum() >= bounds.frames


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
            if cost == "decode" and max(result.encoder_flops) > allowed_flops(costs, plan.ranks):
                continue
            assert bound <= result.imbalance[cost] * (1 + 1e-12), (seed, cost)


def test_frames_of_a_long_group_on_many_ranks():
    """One group of 12 equal units, each 3 frames after the one before: 4 ranks decode 34, 25, 16 and 7 frames."""
    clip = Segment(kind="video", source="a", units=media_units("video", 12, group=12))
    costs = row_costs(TokenSequence((clip,)), MODEL)
    assert lower_bounds(costs, (1, 4)).frames == 34 + 25 + 16 + 7


def test_a_rank_with_two_groups_still_encodes_its_share():
    """Three groups of 20 equal units on two ranks: one runs through two groups and shows at least 28 of 60 units."""
    units = media_units("video", 60, group=20)
    model = replace(MODEL, rates=Rates(seek_ns=0))
    costs = row_costs(TokenSequence((Segment(kind="video", source="a", units=units),)), model)
    limit = allowed_flops(costs, 2)
    shown = (int(costs.flops.sum()) - limit) // int(costs.flops[0]) * int(costs.output_ns[0])
    assert lower_bounds(costs, (1, 2)).decode_ns == 2 * 58 * FRAME_NS + shown


def test_dear_units_limit_what_else_fits():
    """Three images on two ranks, each image dearer than all sound: the rank of one image takes nearly all the sound."""
    draw = np.random.default_rng(0)
    for _ in range(40):
        images = media_units("image", int(draw.integers(1, 4)), grain=int(draw.integers(6, 12)))
        windows = media_units("audio", int(draw.integers(4, 8)))
        row = (Segment(kind="image", source="b", units=images), Segment(kind="audio", source="a", units=windows))
        costs, ranks = row_costs(TokenSequence(row), MODEL), int(draw.integers(2, 4))
        bound, limit = decoding_beside_encoding(costs, ranks), allowed_flops(costs, ranks)
        units, least = np.arange(costs.num_units), []
        for owners in product(range(ranks), repeat=costs.num_units):
            flops = np.bincount(owners, weights=costs.flops, minlength=ranks)
            if flops.max() <= limit:
                least.append(int(costs.decoding(units, np.array(owners), ranks)[0].max()))
        assert bound <= min(least, default=bound)
