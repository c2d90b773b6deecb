"""Tokens of ring groups: equal in number, in few ranges, even at every hop when documents are packed.

Run: python -m pytest tests/sharding/test_ring_tokens.py
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcp.sequence import Segment, TokenSequence, pack
from mmcp.sharding.balance import balance
from mmcp.sharding.cost import LayerCost, row_costs
from mmcp.sharding.needs import FEW_RANGES, STATE_RANGES, Needs, layer_needs
from mmcp.sharding.pairs import slowest_hops
from mmcp.sharding.ranges import as_indices, union
from mmcp.sharding.ring_tokens import lay_tokens
from mmcp.sharding.strategies import STRATEGIES
from tests.sharding.rows import MODEL, media_units


def text_row(lengths):
    return pack([TokenSequence((Segment(kind="text", ids=(1,) * length),)) for length in lengths])


def tokens_of(sequence, mesh, needs=Needs()):  # noqa: B008  frozen
    return lay_tokens(sequence.document_bounds, mesh, row_costs(sequence, MODEL), needs)


def hops_over_even(sequence, tokens, mesh):
    costs, u = row_costs(sequence, MODEL), mesh[1]
    groups = tuple(union(tokens[i * u : (i + 1) * u]) for i in range(mesh[0]))
    return slowest_hops(costs.group_pairs(groups)[0]) * mesh[0] / costs.pairs[0]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 40), max_size=8),
    st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (4, 1)]),
    st.sampled_from([1, 2, 4]),
)
def test_every_token_once_and_even_in_number(lengths, mesh, max_ranges):
    sequence = text_row(lengths)
    tokens = tokens_of(sequence, mesh, Needs(max_ranges=max_ranges))
    held = [as_indices(ranges) for ranges in tokens]
    assert np.sort(np.concatenate(held)).tolist() == list(range(sequence.num_tokens))
    assert max(map(len, held)) - min(map(len, held)) <= 1


def test_one_document_lies_in_zigzag():
    assert tokens_of(text_row([8]), (2, 1)) == (((0, 2), (6, 8)), ((2, 6),))
    assert tokens_of(text_row([8]), (2, 2)) == (((0, 2),), ((6, 8),), ((2, 4),), ((4, 6),))


@pytest.mark.parametrize("mesh", [(2, 8), (4, 4), (8, 8)])
def test_a_long_document_with_short_ones_is_even_at_every_hop(mesh):
    draw = np.random.default_rng(0)
    sequence = text_row([60_000, *draw.integers(200, 3000, 30).tolist()])
    tokens = tokens_of(sequence, mesh)
    assert hops_over_even(sequence, tokens, mesh) <= 1.03
    assert max(map(len, tokens)) <= FEW_RANGES
    plain = STRATEGIES["zigzag"](sequence, mesh, row_costs(sequence, MODEL)).tokens
    assert hops_over_even(sequence, plain, mesh) > 1.3


def test_layers_that_pass_state_ask_for_fewer_ranges():
    softmax = LayerCost(count=1, heads=4, pair_flops=4, token_flops=0)
    assert layer_needs([softmax]).max_ranges == FEW_RANGES
    assert layer_needs([softmax, replace(softmax, mode="state")]).max_ranges == STATE_RANGES
    draw = np.random.default_rng(0)
    sequence = text_row(draw.integers(500, 3000, 12).tolist())
    for max_ranges in (1, 2, 4):
        tokens = tokens_of(sequence, (4, 2), Needs(max_ranges=max_ranges))
        assert max(map(len, tokens)) <= max_ranges


def test_no_range_is_refused():
    with pytest.raises(ValueError, match="use at least 1"):
        Needs(max_ranges=0)


def test_a_plan_over_the_memory_cap_is_refused():
    sequence = TokenSequence((Segment(kind="image", source="a", units=media_units("image", 8, grain=4)),))
    costs = row_costs(sequence, MODEL)
    share = costs.total_bytes // 4
    for name in STRATEGIES:
        with pytest.raises(ValueError, match=f"the cap is {share // 2:,}"):
            STRATEGIES[name](sequence, (1, 4), costs, Needs(), share // 2)
    plan = STRATEGIES["balanced"](sequence, (1, 4), costs, Needs(), share + share // 8)
    assert max(balance(sequence, plan, costs).bytes) <= share + share // 8


def test_the_cap_wins_over_even_encoding():
    """Four units that are large and quick, four that are small and slow: two ranks of half the memory each."""
    large, small = media_units("image", 4, grain=4), media_units("image", 4, grain=1)
    model = replace(
        MODEL,
        encoder_flops={"image": lambda size: 10_000_000 if size[0] == 8 else 1},
        encoder_bytes={"image": lambda size: 10 if size[0] == 8 else 1_000_000},
    )
    row = TokenSequence(
        (Segment(kind="image", source="a", units=small), Segment(kind="image", source="b", units=large))
    )
    costs = row_costs(row, model)
    cap = costs.total_bytes * 11 // 20
    assert max(balance(row, STRATEGIES["balanced"](row, (1, 2), costs, Needs(), cap), costs).bytes) <= cap
