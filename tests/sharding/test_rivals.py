"""The layouts of other systems against torch's own index generators, and against their descriptions by hand.

Run: python -m pytest tests/sharding/test_rivals.py
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from torch.nn.attention.flex_attention import create_block_mask

from mmcp.masks import Mask
from mmcp.sequence import Segment, TokenSequence, pack
from mmcp.sharding.balance import balance
from mmcp.sharding.blocks import block_costs
from mmcp.sharding.cost import row_costs
from mmcp.sharding.ranges import as_indices, size
from mmcp.sharding.strategies import STRATEGIES
from tests.sharding.rows import MODEL, media_units
from tests.sharding.test_pairs import dense


def text_row(*lengths):
    return pack([TokenSequence((Segment(kind="text", ids=(1,) * length),)) for length in lengths])


def plan_of(name, sequence, ranks):
    return STRATEGIES[name](sequence, (1, ranks), row_costs(sequence, MODEL))


def as_shards(indices, ranks):
    """Torch's contract: the reordered sequence is cut into equal chunks, one a rank."""
    return [sorted(chunk.tolist()) for chunk in indices.flatten().chunk(ranks)]


def shards(plan):
    return [as_indices(ranges).tolist() for ranges in plan.tokens]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_zigzag_is_torchs_head_tail(ranks):
    expected = _HeadTailLoadBalancer(32, ranks, "cpu")._generate_indices()
    assert shards(plan_of("zigzag", text_row(32), ranks)) == as_shards(expected, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_document_zigzag_is_torchs_per_document_head_tail(ranks):
    expected = _PerDocumentHeadTailLoadBalancer([[16, 8, 40]], ranks, "cpu")._generate_indices()
    assert shards(plan_of("document_zigzag", text_row(16, 8, 40), ranks)) == as_shards(expected, ranks)


@pytest.mark.parametrize("lengths", [(2048,), (1000, 24, 1024), (130, 1918)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_processing_time_is_torchs_round_robin(ranks, lengths):
    sequence = text_row(*lengths)
    documents = torch.from_numpy(sequence.documents)

    def causal(b, h, q, k):
        return (k <= q) & (documents[q] == documents[k])

    mask = create_block_mask(causal, None, None, 2048, 2048, device="cpu")
    expected = _PTRRLoadBalancer(mask, ranks)._generate_indices()
    assert shards(plan_of("processing_time", sequence, ranks)) == as_shards(expected, ranks)


@pytest.mark.parametrize("seed", range(6))
def test_block_costs_count_the_blocks_of_a_dense_mask(seed):
    draw = np.random.default_rng(seed)
    units = media_units("image", 3, grain=int(draw.integers(1, 60)))
    words = [Segment(kind="text", ids=(1,) * int(draw.integers(1, 300)), attends="prefix") for _ in range(2)]
    sequence = pack([TokenSequence((words[0], Segment(kind="image", units=units, attends="both"), words[1]))] * 2)
    allowed = dense(sequence, 0)
    s = sequence.num_tokens
    expected = [sum(allowed[q : q + 128, k : k + 32].any() for k in range(0, s, 32)) for q in range(0, s, 128)]
    assert block_costs(Mask.of(sequence).slices, s, keys_per_block=32).tolist() == expected


def test_lpt_stays_within_its_guarantee():
    sequence = text_row(3000, 500, 2000)
    plan = plan_of("lpt_blocks", sequence, 3)
    work = block_costs(Mask.of(sequence).slices, sequence.num_tokens, keys_per_block=32)
    owners = plan.owner[::128]
    loads = np.bincount(owners, weights=work, minlength=3)
    assert loads.max() <= (4 / 3 - 1 / 9) * max(loads.mean(), work.max())


def test_striped_deals_single_tokens():
    assert shards(plan_of("striped", text_row(7), 3)) == [[0, 3, 6], [1, 4], [2, 5]]


def clip_row():
    """Six units of 1, 1, 1, 9, 9, 9 rows in two clips."""
    return TokenSequence(
        (
            Segment(kind="image", source="small", units=media_units("image", 3, grain=1)),
            Segment(kind="image", source="large", units=media_units("image", 3, grain=9)),
        )
    )


@pytest.mark.parametrize(
    ("name", "encode"),
    [
        ("frame_count", [[0, 1, 2], [3, 4, 5]]),
        ("patch_cost", [[0, 1, 2, 3], [4, 5]]),
        ("whole_video_lpt", [[3, 4, 5], [0, 1, 2]]),
        ("replicate", [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]),
        ("contiguous", [[0, 1, 2, 3, 4], [5]]),
    ],
)
def test_who_encodes_what(name, encode):
    assert [as_indices(units).tolist() for units in plan_of(name, clip_row(), 2).encode] == encode


def test_replicating_routes_nothing_and_encodes_all_on_every_rank():
    sequence = clip_row()
    costs = row_costs(sequence, MODEL)
    plan = plan_of("replicate", sequence, 3)
    result = balance(sequence, plan, costs)
    assert sum(result.routed_rows) == 0
    assert result.imbalance["encode"] == result.imbalance["decode"] == 3.0
    assert plan.encoder.tolist() == plan.owner.tolist()


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {"replicate"}))
def test_all_others_encode_each_unit_once(name):
    sequence = clip_row()
    assert sum(size(units) for units in plan_of(name, sequence, 4).encode) == len(sequence.units)


def test_tokens_that_are_cut_apart_lie_in_order():
    for name in ("frame_count", "patch_cost", "whole_video_lpt", "replicate"):
        ends = [ranges[0] for ranges in plan_of(name, text_row(30), 3).tokens]
        assert all(before[1] == after[0] for before, after in pairwise(ends))
