"""The mask as tiles coloured by the rank that holds their queries, and the work of each hop of a ring.

Counted in closed form from the mask's slices; no matrix of tokens by tokens is made.
"""

from itertools import pairwise

import numpy as np
import plotly.graph_objects as go

from mmcp.masks import Mask
from mmcp.report.numbers import short
from mmcp.report.page import SQUARE, Section, figure, table
from mmcp.report.palette import SCALE
from mmcp.report.rank_groups import RankGroups
from mmcp.sharding.pairs import group_pairs
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import even_bounds

TILES = 64
GAPS_UP_TO = 24  # tiles; more are too narrow to be parted
VEIL = [[0, "rgba(128,128,128,0)"], [1, "rgba(128,128,128,0.85)"]]


def mask_sections(plan: ShardPlan, mask: Mask) -> list[Section]:
    """Show the tiles of the mask and, on a mesh with a ring, the hops that compute them; nothing of an empty row."""
    if not plan.num_tokens:
        return []
    return [_tiles_section(plan, mask), *([_hops_section(plan, mask)] if plan.ring > 1 else [])]


def tile_pairs(mask: Mask, edges: list[int]) -> np.ndarray:
    """Count the (query, key) pairs between stretches of tokens: [tiles, tiles] int64, queries by row."""
    return group_pairs(mask.slices, [((low, high),) for low, high in pairwise(edges)])


def hop_pairs(plan: ShardPlan, mask: Mask) -> np.ndarray:
    """Count the pairs of ring group i at hop j, when it has the keys of group i - j: [ring, hops] int64."""
    counts, groups = group_pairs(mask.slices, plan.group_tokens), np.arange(plan.ring)
    return counts[groups[:, None], (groups[:, None] - groups) % plan.ring]


def _tiles_section(plan: ShardPlan, mask: Mask) -> Section:
    edges = even_bounds(plan.num_tokens, min(TILES, plan.num_tokens))
    pairs = tile_pairs(mask, edges)
    sizes = np.diff(edges)
    full = pairs / np.outer(sizes, sizes)
    owners = [np.unique(plan.owner[low:high]) for low, high in pairwise(edges)]
    holders = [str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in owners]
    spans = [f"{low:,} to {high - 1:,}" for low, high in pairwise(edges)]
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    colours = [int(plan.owner[int(middle)]) for middle in middles]
    owner = [[colour if count else None for count in row] for colour, row in zip(colours, pairs.tolist(), strict=True)]
    veil = [[round(1 - share, 3) if share else None for share in row] for row in full.tolist()]
    gap = 1 if len(spans) <= GAPS_UP_TO else 0
    bar = {"title": {"text": "rank"}, "thickness": 12, "tickformat": "d"}
    place = {"x": middles, "y": middles, "xgap": gap, "ygap": gap}
    heats = [
        go.Heatmap(
            z=owner, **place, colorscale=SCALE, zmin=0, zmax=max(1, plan.ranks - 1), colorbar=bar, hoverinfo="skip"
        ),
        go.Heatmap(
            z=veil, **place, colorscale=VEIL, zmin=0, zmax=1, showscale=False,
            text=[[holder] * len(spans) for holder in holders],
            hovertemplate="queries about %{y:,.0f}, held by rank %{text}<br>keys about %{x:,.0f}<br>"
            "%{z:.1%} of the pairs are not read<extra></extra>",
        ),
    ]  # fmt: skip
    picture = figure(heats, height=460, meta=SQUARE)
    picture.update_layout(margin={"l": 60, "r": 10, "t": 15, "b": 45})
    limits = [0, plan.num_tokens]
    picture.update_xaxes(title_text="key", showgrid=False, zeroline=False, range=limits, constrain="domain")
    picture.update_yaxes(title_text="query", showgrid=False, zeroline=False, range=limits[::-1], scaleanchor="x")
    picture.update_yaxes(constrain="domain", constraintoward="top")
    where = (
        "Under Ulysses every rank computes all tiles for its share of the heads; the colour tells who holds the "
        "queries before the exchange."
        if plan.ring == 1
        else f"The ring axis has {plan.ring} groups; each computes the tiles of its queries, hop by hop."
    )
    read = mask.pairs()
    share = f"{read / plan.num_tokens**2:.2%}"
    rows = [
        (span, holder, short(int(row.sum())), f"{row.sum() / max(1, read):.2%}")
        for span, holder, row in zip(spans, holders, pairs, strict=True)
    ]
    return Section(
        title="The mask over the ranks",
        text=f"{short(read)} pairs of query and key are read, {share} of all. A tile has the colour of the rank that "
        f"holds its queries; the greyer, the fewer of its pairs are read; where there is no tile, none. {where}",
        pictures=[picture],
        table=table(("queries", "held by rank", "pairs", "of all"), rows),
    )


def _hops_section(plan: ShardPlan, mask: Mask) -> Section:
    counts, groups = hop_pairs(plan, mask), RankGroups.of(plan.ring)
    shown = groups.sums(counts)
    mean = counts.mean(axis=0)
    slowest = counts.max(axis=0)
    heat = go.Heatmap(
        x=groups.middles,
        y=groups.middles,
        z=shown.tolist(),
        colorscale=SCALE,
        colorbar={"title": {"text": "pairs"}, "thickness": 12, "exponentformat": "SI"},
        hovertemplate="group %{y} at hop %{x}<br>%{z:,.4s} pairs<extra></extra>",
        zmin=0,
        zmax=max(1, int(shown.max())),
        xgap=1,
        ygap=1,
    )
    picture = figure([heat], height=380, meta=SQUARE)
    picture.update_layout(margin={"l": 55, "r": 10, "t": 15, "b": 45})
    picture.update_xaxes(groups.axis, title_text="hop", showgrid=False, zeroline=False)
    picture.update_yaxes(groups.axis, title_text="ring group", showgrid=False, zeroline=False, autorange="reversed")
    lost = int(slowest.sum()) / max(1, int(mean.sum()))
    rows = [
        (str(hop), short(int(slowest[hop])), short(float(mean[hop])), str(int(counts[:, hop].argmax())))
        for hop in range(plan.ring)
    ]
    grouped = " A cell adds up several groups and hops." if groups.is_grouped else ""
    return Section(
        title="Work of each hop of the ring",
        text="At hop j a group has the keys of the group j before it, and all wait for the slowest: softmax layers of "
        f"mode ring take {lost:.3f} of what even hops would.{grouped}",
        pictures=[picture],
        table=table(("hop", "pairs of the slowest", "mean", "slowest group"), rows),
    )
