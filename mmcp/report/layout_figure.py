"""Ribbon, routes, label rows and mask of a plan as panels of a matplotlib figure."""

from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import SubFigure

from mmcp.masks import Mask
from mmcp.report.mask_tiles import TILES, tile_pairs
from mmcp.report.palette import BLUE, MODALITY, ORANGE
from mmcp.report.rank_groups import RankGroups
from mmcp.report.ribbon import row_of_plan
from mmcp.report.routes import label_routes, routes
from mmcp.sequence import KINDS
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import even_bounds

COLUMNS = 1500  # of the ribbon
RANK_COLOURS = "cividis"


def draw_ribbon(figure: SubFigure, plan: ShardPlan) -> None:
    """Draw modality, owner and encoder of the row as three strips."""
    strips = figure.subplots(3, 1, sharex=True)
    edges = even_bounds(plan.num_tokens, max(1, min(COLUMNS, plan.num_tokens)))
    middles = (np.array(edges[:-1]) + np.array(edges[1:])) // 2 if plan.num_tokens else np.zeros(0, dtype=np.int64)
    row = row_of_plan(plan)
    kinds = np.array(row["kind"], dtype=np.int64)[np.searchsorted(row["start"], middles, side="right") - 1]
    owners, encoders = plan.owner[middles], plan.encoder[middles]
    colours = ListedColormap([MODALITY[kind] for kind in KINDS])
    extent = (0, max(1, plan.num_tokens), 0, 1)
    style = {"aspect": "auto", "extent": extent, "interpolation": "nearest"}
    last = max(1, plan.ranks - 1)
    shown = np.ma.masked_less(encoders, 0)
    strips[0].imshow(kinds[None], cmap=colours, vmin=-0.5, vmax=len(KINDS) - 0.5, **style)
    strips[1].imshow(owners[None], cmap=RANK_COLOURS, vmin=0, vmax=last, **style)
    strips[2].imshow(shown[None], cmap=RANK_COLOURS, vmin=0, vmax=last, **style)
    for axes, name in zip(strips, ("modality", "held by", "encoded by"), strict=True):
        axes.set_yticks([0.5], [name])
    strips[2].set_xlabel("token (dark to bright: first to last rank)")


def draw_exchanges(figure: SubFigure, plan: ShardPlan, mask: Mask | None) -> None:
    """Draw the matrix of embedding rows, the label rows before and after routing and, where known, the mask."""
    panels = figure.subplots(1, 2 if mask is None or not plan.num_tokens else 3)
    _draw_routes(panels[0], plan)
    _draw_labels(panels[1], plan)
    if mask is not None and plan.num_tokens:
        _draw_mask(panels[2], plan, mask)


def _draw_routes(axes: Axes, plan: ShardPlan) -> None:
    counts, groups = routes(plan), RankGroups.of(plan.ranks)
    np.fill_diagonal(counts, 0)
    moved = np.ma.masked_equal(groups.sums(counts), 0)
    edge = plan.ranks - 0.5
    image = axes.imshow(moved, cmap=RANK_COLOURS, vmin=0, extent=(-0.5, edge, edge, -0.5), interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, shrink=0.8)
    axes.set(title="rows moved", xlabel="held by rank", ylabel="encoded by rank")


def _draw_labels(axes: Axes, plan: ShardPlan) -> None:
    counts, groups = label_routes(plan), RankGroups.of(plan.ranks)
    wide = 0.4 * (groups.edges[1] - groups.edges[0])
    for side, values, name, colour, hatch in (
        (-0.5, counts.sum(axis=1), "held", ORANGE, "//"),
        (0.5, counts.sum(axis=0), "scored", BLUE, ""),
    ):
        means = [part.mean() for part in groups.cut(values.tolist())]
        axes.bar(np.array(groups.middles) + side * wide, means, wide, color=colour, hatch=hatch, label=name)
    axes.set(title="label rows, mean of neighbours" if groups.is_grouped else "label rows", xlabel="rank")
    axes.legend()
    axes.locator_params(axis="x", integer=True)


def _draw_mask(axes: Axes, plan: ShardPlan, mask: Mask) -> None:
    """Draw each tile in the colour of its queries' owner, paler where fewer of its pairs are read."""
    edges = even_bounds(plan.num_tokens, min(TILES, plan.num_tokens))
    sizes = np.diff(edges)
    full = tile_pairs(mask, edges) / np.outer(sizes, sizes)
    owners = np.array([plan.owner[(low + high) // 2] for low, high in pairwise(edges)])
    picture = np.broadcast_to(owners[:, None], full.shape)
    extent = (0, plan.num_tokens, plan.num_tokens, 0)
    last = max(1, plan.ranks - 1)
    axes.imshow(picture, cmap=RANK_COLOURS, vmin=0, vmax=last, alpha=full, extent=extent, interpolation="nearest")
    axes.set(title="mask, by the queries' rank", xlabel="key", ylabel="query")
