"""The layout of a row over ranks as pictures: who holds what, who encodes it, and how even the work is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from mmcp.report.numbers import short
from mmcp.report.page import Section, facts_table, page, table
from mmcp.report.palette import BLUE, GREY, MODALITY, SERIES, VERMILION
from mmcp.report.ribbon import ribbon_section
from mmcp.report.terminal import COLUMNS, COST_OF, ratios, routed
from mmcp.sequence import KINDS, TokenSequence
from mmcp.sharding.plan import ShardPlan

BARS = 64  # beyond this many ranks, a bar stands for several


@dataclass(frozen=True)
class Bars:
    """Ranks grouped into at most BARS bars of neighbours."""

    groups: list[list[dict]]
    """Entries of `per_rank`, by bar."""

    @staticmethod
    def of(per_rank: list[dict]) -> "Bars":
        each = -(-len(per_rank) // BARS)
        return Bars([per_rank[start : start + each] for start in range(0, len(per_rank), each)])

    @property
    def labels(self) -> list[str]:
        ends = [(group[0]["rank"], group[-1]["rank"]) for group in self.groups]
        return [str(first) if first == last else f"{first} to {last}" for first, last in ends]

    @property
    def is_grouped(self) -> bool:
        return len(self.groups[0]) > 1

    def draw(self, values: list[float], *, name: str, colour: str) -> go.Bar:
        """Return one value per bar as bars over a numeric axis of ranks."""
        each = len(self.groups[0])
        middles = [(group[0]["rank"] + group[-1]["rank"]) / 2 for group in self.groups]
        hover = "rank %{text}<br>%{y:,.4s} " + name + "<extra></extra>"
        style = {"color": colour, "line": {"width": 0}}
        return go.Bar(
            x=middles,
            y=values,
            width=0.9 * each,
            text=self.labels,
            textposition="none",
            name=name,
            marker=style,
            hovertemplate=hover,
        )


@dataclass(frozen=True)
class View:
    """A plan and its `inspect` record."""

    record: dict
    plan: ShardPlan


def write_shard_report(
    path: Path, views: Sequence[View], *, title: str, facts: Mapping[str, str], sequence: TokenSequence | None
) -> None:
    """Write one HTML file that shows a row's plans, side by side when there are several.

    facts: what is known of the row, in words
    sequence: the row itself, for clip times; None when it is not at hand
    """
    sections = [_facts_section(facts)]
    if len(views) > 1:
        sections.append(_comparison_section([view.record for view in views]))
    for view in views:
        own = shard_sections(view.record, view.plan, sequence=sequence)
        name = view.record["strategy"]
        sections += own if len(views) == 1 else [replace(part, title=f"{name}: {part.title}") for part in own]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(title, sections), encoding="utf-8")


def _facts_section(facts: Mapping[str, str]) -> Section:
    return Section(
        title="What was planned",
        text="Planned from metadata alone: containers were demuxed, no picture and no sound was decoded.",
        table=facts_table(facts),
        table_title="The row",
        is_table_open=True,
    )


def _comparison_section(records: Sequence[dict]) -> Section:
    """Draw step time and each cost over the least there can be, a group of bars per strategy."""
    figure = go.Figure()
    for number, record in enumerate(records):
        names, values = zip(*ratios(record).items(), strict=True)
        colour = SERIES[number % len(SERIES)]
        figure.add_trace(go.Bar(x=names, y=values, name=record["strategy"], marker_color=colour))
    figure.add_hline(y=1.0, line={"color": GREY, "dash": "dash", "width": 2})
    figure.update_layout(barmode="group", height=360, legend={"orientation": "h", "y": 1.15})
    figure.update_yaxes(title_text="slowest rank / least mean", rangemode="tozero")
    rows = [
        (record["strategy"], *(f"{ratio:.3f}" for ratio in ratios(record).values()), short(routed(record)))
        for record in records
    ]
    return Section(
        title="Strategies side by side",
        text="Step time and each cost on its slowest rank, over the least mean that any plan could have; dashed: "
        "that least, 1.0.",
        picture=figure,
        table=table(("strategy", *ratios(records[0]), "rows routed"), rows),
        is_table_open=True,
    )


def shard_sections(record: dict, plan: ShardPlan, *, sequence: TokenSequence | None) -> list[Section]:
    """Return the sections of a shard report."""
    return [ribbon_section(plan, sequence), _modality_section(record), _cost_section(record)]


def _modality_section(record: dict) -> Section:
    bars = Bars.of(record["per_rank"])
    means = {
        kind: [sum(entry["by_modality"][kind] for entry in group) / len(group) for group in bars.groups]
        for kind in KINDS
    }
    figure = go.Figure([bars.draw(means[kind], name=kind, colour=MODALITY[kind]) for kind in KINDS])
    legend = {"orientation": "h", "y": 1.15, "traceorder": "normal"}
    figure.update_layout(barmode="stack", height=320, legend=legend)
    figure.update_xaxes(title_text="rank", **_rank_ticks(record["ranks"]))
    figure.update_yaxes(title_text="tokens held")
    rows = [(label, *map(short, row)) for label, *row in zip(bars.labels, *means.values(), strict=True)]
    return Section(
        title="Tokens by modality",
        text="What the tokens of each rank are." + (" A bar is the mean of several ranks." if bars.is_grouped else ""),
        picture=figure,
        table=table(("rank", *KINDS), rows),
    )


def _cost_section(record: dict) -> Section:
    bars = Bars.of(record["per_rank"])
    most = {field: [max(entry[field] for entry in group) for group in bars.groups] for field in COLUMNS}
    titles = [f"{heading} {_imbalance(record, field)}" for field, heading in COLUMNS.items()]
    figure = make_subplots(rows=3, cols=3, subplot_titles=titles, vertical_spacing=0.12, horizontal_spacing=0.07)
    for number, (field, heading) in enumerate(COLUMNS.items()):
        place = {"row": number // 3 + 1, "col": number % 3 + 1}
        colour = BLUE if field in COST_OF else GREY
        figure.add_trace(bars.draw(most[field], name=heading, colour=colour), **place)
        mean = sum(entry[field] for entry in record["per_rank"]) / record["ranks"]
        figure.add_hline(y=mean, line={"color": VERMILION, "dash": "dash", "width": 2}, **place)
    figure.update_layout(height=720, showlegend=False)
    figure.update_xaxes(**_rank_ticks(record["ranks"]))
    figure.update_yaxes(rangemode="tozero")
    rows = [(label, *map(short, row)) for label, *row in zip(bars.labels, *most.values(), strict=True)]
    rows.append(("imbalance", *(_imbalance(record, field) for field in COLUMNS)))
    return Section(
        title="Work by rank",
        text="Bars: each rank; dashed: the mean. The figure beside a cost is its slowest rank over the least mean "
        f"any plan could have. Step time over the least: {record['makespan_ratio']:.3f}."
        + (" A bar is the most of several ranks." if bars.is_grouped else ""),
        picture=figure,
        table=table(("rank", *COLUMNS.values()), rows),
        is_table_open=record["ranks"] <= 8,
    )


def _rank_ticks(ranks: int) -> dict:
    return {"tick0": 0, "dtick": max(1, -(-ranks // 8)), "range": [-0.6, ranks - 0.4]}


def _imbalance(record: dict, field: str) -> str:
    return f"{record['imbalance'][COST_OF[field]]:.3f}" if field in COST_OF else ""
