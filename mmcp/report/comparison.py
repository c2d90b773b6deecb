"""Strategies for one row side by side: step time, every cost, and who holds what."""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from mmcp.report.numbers import short
from mmcp.report.page import Section, figure, table
from mmcp.report.palette import BLUE, GREY, SCALE, VERMILION
from mmcp.report.terminal import ratios, routed
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import even_bounds

COLUMNS = 240  # of the picture of owners
WORST_SHOWN = 4.0  # ratio from which on the colour stays the same


def comparison_section(records: Sequence[Mapping]) -> Section:
    """Show step time and each cost of every strategy, the quickest first."""
    ordered = sorted(records, key=lambda record: record["makespan_ratio"])
    names = [record["strategy"] for record in ordered]
    rows = [
        (record["strategy"], *(f"{ratio:.3f}" for ratio in ratios(record).values()), short(routed(record)),
         f"{record['plan_ms']:,.1f}")
        for record in ordered
    ]  # fmt: skip
    return Section(
        title="Strategies side by side",
        text="Step time and each cost of its slowest rank, over the least mean that any plan could have: at 1 all is "
        "even and nothing is done twice. The quickest strategy stands first.",
        pictures=[_step_times(ordered, names), _costs(ordered, names)],
        table=table(("strategy", *ratios(records[0]), "rows routed", "planned in ms"), rows),
        is_table_open=True,
    )


def owners_section(plans: Sequence[ShardPlan]) -> Section:
    """Show who holds each part of the row under every strategy."""
    edges = even_bounds(plans[0].num_tokens, min(COLUMNS, plans[0].num_tokens))
    middles = (np.array(edges[:-1]) + np.array(edges[1:])) // 2
    owners = [plan.owner[middles].tolist() for plan in plans]
    names = [plan.strategy for plan in plans]
    heat = go.Heatmap(
        x=edges,
        y=names,
        z=owners,
        colorscale=SCALE,
        zmin=0,
        zmax=max(1, plans[0].ranks - 1),
        ygap=3,
        colorbar={"title": {"text": "rank"}, "thickness": 12, "tickformat": "d"},
        hovertemplate="%{y}<br>token %{x:,}: rank %{z}<extra></extra>",
    )
    picture = figure([heat], height=60 + 32 * len(names))
    picture.update_layout(margin={"l": 125, "r": 10, "t": 10, "b": 45})
    picture.update_yaxes(autorange="reversed", showgrid=False)
    picture.update_xaxes(title_text="token", showgrid=False)
    rows = [
        (plan.strategy, f"{max(map(len, plan.tokens)):,}", f"{min(plan.lengths):,}", f"{max(plan.lengths):,}")
        for plan in plans
    ]
    return Section(
        title="Who holds what",
        text="The row from left to right, a line for each strategy, in the colour of the rank that holds the tokens "
        f"(one token in {max(1, plans[0].num_tokens // max(1, len(middles))):,} is drawn).",
        pictures=[picture],
        table=table(("strategy", "most ranges of a rank", "fewest tokens", "most tokens"), rows),
    )


def _step_times(ordered: Sequence[Mapping], names: list[str]) -> go.Figure:
    values = [record["makespan_ratio"] for record in ordered]
    colors = [BLUE if name == "balanced" else GREY for name in names]
    bars = go.Bar(
        y=names, x=values, orientation="h", marker={"color": colors}, text=[f"{value:.3f}" for value in values],
        textposition="outside", cliponaxis=False, hovertemplate="%{y}: %{x:.3f}<extra></extra>",
    )  # fmt: skip
    picture = figure([bars], height=75 + 30 * len(names), title="step time / least")
    picture.update_layout(margin={"l": 125, "r": 25, "t": 40, "b": 35})
    picture.add_vline(x=1.0, line={"color": VERMILION, "dash": "dash", "width": 2})
    bound = ordered[0].get("makespan_bound")
    if bound is not None and bound > 1.0:
        picture.add_vline(x=bound, line={"color": VERMILION, "dash": "dot", "width": 2})
    picture.update_yaxes(autorange="reversed", showgrid=False)
    picture.update_xaxes(range=[0, 1.12 * max(values)])
    return picture


def _costs(ordered: Sequence[Mapping], names: list[str]) -> go.Figure:
    costs = list(ordered[0]["imbalance"])
    values = [[record["imbalance"][cost] for cost in costs] for record in ordered]
    heat = go.Heatmap(
        x=costs,
        y=names,
        z=[[float(np.log(min(value, WORST_SHOWN))) for value in row] for row in values],
        zmin=0,
        zmax=float(np.log(WORST_SHOWN)),
        colorscale=SCALE,
        showscale=False,
        text=[[f"{value:.2f}" for value in row] for row in values],
        texttemplate="%{text}",
        hovertemplate="%{y}, %{x}: %{text}<extra></extra>",
        xgap=2,
        ygap=2,
    )
    picture = figure([heat], height=75 + 30 * len(names), title="slowest rank / least mean, by cost")
    picture.update_layout(margin={"l": 125, "r": 10, "t": 40, "b": 65})
    picture.update_yaxes(autorange="reversed", showgrid=False)
    picture.update_xaxes(showgrid=False, tickangle=-40)
    return picture
