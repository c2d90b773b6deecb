"""Tokens of a group cut over its ranks: every token once, and against the best cut by brute force.

Run: python -m pytest tests/sharding/test_members.py
"""

from itertools import product

import numpy as np
import pytest

from mmcp.sequence import Segment, TokenSequence
from mmcp.sharding.balance import balance
from mmcp.sharding.cost import row_costs
from mmcp.sharding.members import EVEN_BYTES, _fill, head_and_body, lighten
from mmcp.sharding.ranges import as_indices, size, split
from mmcp.sharding.strategies import STRATEGIES
from mmcp.sharding.workloads import make_workload, reference_model
from tests.sharding.rows import MODEL, media_units


def test_each_rank_gets_a_part_of_the_head_and_of_the_body():
    assert head_and_body((((0, 8),),), 2, 4) == (((0, 2), (6, 8)), ((2, 6),))
    groups = (((0, 2), (6, 8)), ((2, 6),))
    assert head_and_body(groups, 2, 3) == (((0, 1), (7, 8)), ((1, 2), (6, 7)), ((4, 6),), ((2, 4),))


@pytest.mark.parametrize("seed", range(40))
def test_the_heaviest_rank_is_as_light_as_can_be(seed):
    draw = np.random.default_rng(seed)
    units, total, token = draw.integers(0, 40, 3), int(draw.integers(0, 12)), int(draw.integers(1, 5))
    most = int(draw.integers(-(-total // 3), total + 1)) if total else 0
    shares = _fill(units, total, most, token)
    assert sum(shares) == total and max(shares) <= most and min(shares) >= 0
    cuts = [cut for cut in product(range(most + 1), repeat=3) if sum(cut) == total]
    best = min(max(u + token * t for u, t in zip(units, cut, strict=True)) for cut in cuts)
    assert max(units + token * np.array(shares)) == best


def test_only_as_many_tokens_move_as_memory_asks_for():
    """One image on the first of four ranks takes as many bytes as 40 tokens; each rank has 200."""
    image = media_units("image", 1)
    row = TokenSequence((Segment(kind="image", source="a", units=image), Segment(kind="text", ids=(1,) * 799)))
    costs = row_costs(row, MODEL)
    tokens, units = split(((0, 800),), 4), np.array([40 * MODEL.token_bytes, 0, 0, 0])
    cut = lighten(costs, tokens, units, 4)
    assert np.sort(np.concatenate([as_indices(part) for part in cut])).tolist() == list(range(800))
    lengths = np.array([size(part) for part in cut])
    assert lengths.argmin() == 0 and 200 < lengths.max() <= 200 * 1049 // 1000
    assert lighten(costs, tokens, np.zeros(4, dtype=np.int64), 4) == tokens


def test_a_transcript_before_the_media_routes_few_rows():
    sequence = make_workload("long_transcript", length=0.2)
    costs = row_costs(sequence, reference_model("hybrid"))
    plan = STRATEGIES["balanced"](sequence, (1, 8), costs)
    result = balance(sequence, plan, costs)
    assert sum(result.routed_rows) <= 0.15 * costs.rows.sum()
    assert max(result.fragments) == 2 and result.imbalance["memory"] <= EVEN_BYTES[0] / EVEN_BYTES[1] + 0.01
