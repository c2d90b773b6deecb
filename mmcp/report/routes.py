"""Who sends rows to whom: embedding rows from encoders to owners, label rows from owners to those who score them."""

import numpy as np
import plotly.graph_objects as go

from mmcp.report.numbers import short, ticks
from mmcp.report.page import SMALL_MARGIN, SQUARE, Section, figure, table
from mmcp.report.palette import BLUE, ORANGE, SCALE
from mmcp.report.rank_groups import GROUPED, RankGroups
from mmcp.sharding.plan import ShardPlan

ROWS_SHOWN = 40  # routes in a table
CELLS_WRITTEN = 12  # ranks up to which each count is written into its cell


def routes(plan: ShardPlan) -> np.ndarray:
    """Count the embedding rows that rank i makes and rank j holds: [ranks, ranks] int64."""
    made = np.flatnonzero(plan.encoder >= 0)
    return _counts(plan.encoder[made], plan.owner[made], plan.ranks)


def label_routes(plan: ShardPlan) -> np.ndarray:
    """Count the hidden rows with a label that rank i holds and rank j scores: [ranks, ranks] int64."""
    return _counts(plan.owner[plan.label_positions], plan.scorer, plan.ranks)


def routes_section(plan: ShardPlan) -> Section:
    """Show the embedding rows that leave the rank that encodes them."""
    groups, counts = RankGroups.of(plan.ranks), routes(plan)
    total, moved = int(counts.sum()), int(counts.sum() - np.trace(counts))
    share = f"{moved:,} of {total:,} rows of encoders ({moved / total:.1%})" if total else "No row of an encoder"
    grouped = " A cell adds up several ranks." if groups.is_grouped else ""
    return Section(
        title="Who sends rows to whom",
        text=f"{share} leave the rank that made them, in one exchange; those that stay are left out.{grouped}",
        pictures=[_matrix(counts, groups, "encoded by rank", "held by rank")],
        table=_route_table(counts, ("encoded by", "held by", "rows")),
    )


def labels_section(plan: ShardPlan) -> Section:
    """Show the label rows of each rank before and after they are routed to those who score them."""
    groups, counts = RankGroups.of(plan.ranks), label_routes(plan)
    before, after = counts.sum(axis=1).tolist(), counts.sum(axis=0).tolist()
    pictures = [
        _labels(groups, before, name="held, before routing", color=ORANGE, pattern="/"),
        _labels(groups, after, name="scored, after routing", color=BLUE, pattern=""),
    ]
    rows = zip(groups.labels, groups.cells(before, short), groups.cells(after, short), strict=True)
    moved = int(counts.sum() - np.trace(counts))
    return Section(
        title="Label rows before and after routing",
        text=f"{plan.num_labels:,} tokens are trained. {moved:,} of their hidden rows go to another rank, so that the "
        "head's work is even wherever the labels lie. The two scales differ." + (GROUPED if groups.is_grouped else ""),
        pictures=pictures,
        is_small=True,
        table=table(("rank", "held", "scored"), rows),
    )


def _labels(groups: RankGroups, values: list[int], *, name: str, color: str, pattern: str) -> go.Figure:
    bars = groups.bars(values, name=name, color=color, pattern=pattern)
    picture = figure([bars], title=f"<b>{name}</b>  at most {max(values):,}", height=240, bargap=0.1, showlegend=False)
    picture.update_layout(margin=SMALL_MARGIN)
    picture.update_xaxes(groups.axis)
    picture.update_yaxes(title_text="label rows", range=[0, 1.12 * max(values) or 1], **ticks(max(values)))
    return picture


def _counts(senders: np.ndarray, receivers: np.ndarray, ranks: int) -> np.ndarray:
    pairs = np.bincount(senders * ranks + receivers, minlength=ranks * ranks)
    return pairs.reshape(ranks, ranks)


def _matrix(counts: np.ndarray, groups: RankGroups, row_title: str, column_title: str) -> go.Figure:
    moved = counts.copy()
    np.fill_diagonal(moved, 0)
    sums = groups.sums(moved)
    labels, is_written = groups.labels, len(groups.labels) <= CELLS_WRITTEN
    shown = [[int(value) or None for value in row] for row in sums.tolist()]
    heat = go.Heatmap(
        x=groups.middles,
        y=groups.middles,
        z=shown,
        colorscale=SCALE,
        zmin=0,
        zmax=max(1, int(sums.max())),
        colorbar={"title": {"text": "rows"}, "thickness": 12},
        text=[[short(value) if value else "" for value in row] for row in shown] if is_written else None,
        texttemplate="%{text}" if is_written else None,
        customdata=[[f"{row} to {column}" for column in labels] for row in labels],
        hovertemplate="from %{y} to %{x}<br>%{z:,} rows<extra></extra>",
        xgap=1,
        ygap=1,
    )
    picture = figure([heat], height=420, meta=SQUARE)
    picture.update_layout(margin={"l": 55, "r": 10, "t": 15, "b": 45})
    picture.update_xaxes(groups.axis, title_text=column_title, showgrid=False, zeroline=False, constrain="domain")
    picture.update_yaxes(
        groups.axis, title_text=row_title, showgrid=False, zeroline=False, autorange="reversed", scaleanchor="x"
    )
    return picture


def _route_table(counts: np.ndarray, headings: tuple[str, str, str]) -> str:
    moved = counts.copy()
    np.fill_diagonal(moved, 0)
    senders, receivers = np.nonzero(moved)
    order = np.argsort(-moved[senders, receivers], kind="stable")
    rows = [
        (str(senders[i]), str(receivers[i]), f"{moved[senders[i], receivers[i]]:,}")
        for i in order[:ROWS_SHOWN].tolist()
    ]
    if len(order) > ROWS_SHOWN:
        rest = int(moved[senders, receivers][order[ROWS_SHOWN:]].sum())
        rows.append((f"{len(order) - ROWS_SHOWN:,} more pairs", "", f"{rest:,}"))
    kept = int(np.trace(counts))
    return table(headings, [*rows, ("stay where they are", "", f"{kept:,}")])
