"""What the pictures tell of a row and a plan, against slow counts over every token, drawn rows and plans.

Compared: pieces and their costs with RowCosts' totals, query pairs and mask tiles and hops with the dense mask, routes
with Balance, compressed runs with what they compress.
Run: python -m pytest tests/report/test_row_pieces.py
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcp.masks import Mask
from mmcp.report.mask_tiles import hop_pairs, tile_pairs
from mmcp.report.numbers import ticks
from mmcp.report.rank_groups import RankGroups
from mmcp.report.ribbon import row_of_plan
from mmcp.report.routes import label_routes, routes
from mmcp.report.row_pieces import query_pairs, row_data, row_pieces, runs
from mmcp.sequence import KINDS
from mmcp.sharding.balance import balance
from mmcp.sharding.cost import row_costs
from mmcp.sharding.ranges import even_bounds
from mmcp.sharding.strategies import STRATEGIES
from tests.sharding.rows import MODEL, rows

DRAWN = settings(max_examples=40, deadline=None)
MESHES = st.sampled_from([(1, 1), (1, 3), (3, 1), (2, 2)])
NAMES = st.sampled_from(["balanced", "striped", "zigzag", "replicate", "frame_count"])


@DRAWN
@given(rows())
def test_pieces_cover_the_row_and_cost_what_it_costs(row):
    costs = row_costs(row, MODEL)
    data = row_data(row, costs)
    assert data["start"] == sorted(set(data["start"])) and (data["start"][:1] == [0]) == (row.num_tokens > 0)
    lengths = np.diff([*data["start"], row.num_tokens])
    tokens = [sum(lengths[np.array(data["kind"]) == kind]) for kind in range(len(KINDS))] if len(lengths) else [0] * 4
    kinds = [segment.kind for segment in row.segments for _ in range(segment.num_tokens)]
    assert tokens == [kinds.count(kind) for kind in KINDS]
    attention = costs.total_attention_flops
    assert sum(data["costs"]["encoder_flops"]) == pytest.approx(int(costs.flops.sum()), rel=0.01)
    assert sum(data["costs"]["backbone_flops"]) == pytest.approx(row.num_tokens * 11_000 + attention, rel=0.01)


@DRAWN
@given(rows(), st.integers(1, 6))
def test_pairs_by_query_and_by_tile(row, parts):
    mask = Mask.of(row)
    edges = even_bounds(row.num_tokens, parts)
    dense = mask.dense()
    by_query = [int(dense[low:high].sum()) for low, high in pairwise(edges)]
    assert query_pairs(mask.slices, np.array(edges)).tolist() == by_query
    tiles = tile_pairs(mask, edges)
    for i in range(parts):
        for j in range(parts):
            assert tiles[i, j] == dense[edges[i] : edges[i + 1], edges[j] : edges[j + 1]].sum()


@DRAWN
@given(rows(), MESHES, NAMES)
def test_routes_hops_and_kinds_of_a_plan(row, mesh, name):
    costs = row_costs(row, MODEL)
    plan = STRATEGIES[name](row, mesh, costs)
    assert routes(plan).tolist() == balance(row, plan, costs).routed
    labels = label_routes(plan)
    slow = np.zeros_like(labels)
    for number, position in enumerate(row.label_positions.tolist()):
        slow[plan.owner[position], plan.scorer[number]] += 1
    assert (labels == slow).all()
    dense, hops = costs.mask.dense(), hop_pairs(plan, costs.mask)
    group = plan.owner // plan.ulysses
    for i in range(plan.ring):
        for hop in range(plan.ring):
            assert hops[i, hop] == dense[np.ix_(group == i, group == (i - hop) % plan.ring)].sum()
    told = row_of_plan(plan)
    kind_at = np.repeat(told["kind"], np.diff([*told["start"], row.num_tokens])).astype(int).tolist()
    assert kind_at == [KINDS.index(segment.kind) for segment in row.segments for _ in range(segment.num_tokens)]


@DRAWN
@given(st.lists(st.integers(-1, 3), max_size=60), st.integers(1, 70))
def test_runs_give_back_what_they_compress(values, limit):
    starts, kept, is_sampled = runs(np.array(values, dtype=np.int64), limit)
    assert len(starts) == len(kept) <= max(limit, 1) and [values[start] for start in starts] == kept
    if not is_sampled:
        assert np.repeat(kept, np.diff([*starts, len(values)])).tolist() == values


def test_text_is_told_as_the_tokenizer_spells_it():
    from tests.report.test_reports import ROW

    told = [piece.words for piece in row_pieces(ROW, lambda ids: f"<{len(ids)} words>")]
    assert told[0] == '"<7 words>"' and told[-1] == '"<20 words>", trained'
    assert "frames 3 at 16 x 8 pixels; decoded from frame 3 on" in told


@pytest.mark.parametrize("ranks", [1, 2, 63, 64, 65, 200, 1024])
def test_groups_of_ranks_fit_and_add_up(ranks):
    groups, values = RankGroups.of(ranks), np.arange(ranks) ** 2
    assert len(groups.labels) <= 64 and groups.is_grouped == (ranks > 64)
    assert sum(part.sum() for part in groups.cut(values)) == values.sum()
    matrix = np.outer(values, values + 1)
    assert groups.sums(matrix).sum() == matrix.sum() and groups.sums(matrix).shape == (len(groups.labels),) * 2
    bars = groups.bars(values.tolist(), name="x", color="#000")
    highest = [mean + above for mean, above in zip(bars.y, bars.error_y.array or [0] * ranks, strict=True)]
    assert max(highest) == pytest.approx(values.max())


def test_marks_of_an_axis():
    assert ticks(4.1e15)["ticktext"] == ["0", "2P", "4P"] and ticks(0)["ticktext"] == ["0"]
    for top in (0.003, 1, 1.9, 37, 1e9):
        marks = ticks(top)
        assert 3 <= len(marks["tickvals"]) <= 5 and marks["tickvals"][-1] <= top < 1.6 * marks["tickvals"][-1]
