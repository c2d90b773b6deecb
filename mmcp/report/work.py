"""What each rank holds and does: tokens by modality, and every cost with its slowest rank over the mean."""

from collections.abc import Mapping

import plotly.graph_objects as go

from mmcp.report.numbers import short, ticks
from mmcp.report.page import LEGEND, SMALL_MARGIN, Section, figure, table
from mmcp.report.palette import BLUE, GREY, MODALITY, PATTERN, VERMILION
from mmcp.report.rank_groups import GROUPED, RankGroups
from mmcp.report.terminal import COLUMNS, COST_OF
from mmcp.sequence import KINDS

UNITS = {
    "tokens": "tokens",
    "decode_s": "seconds",
    "encoder_flops": "forward FLOPs",
    "linear_flops": "forward FLOPs",
    "attention_flops": "forward FLOPs",
    "label_rows": "rows",
    "routed_rows": "rows",
    "bytes": "bytes",
    "fragments": "ranges",
}


def modality_section(record: Mapping) -> Section:
    """Show what the tokens of each rank are."""
    groups = RankGroups.of(record["ranks"])
    held = {kind: [entry["by_modality"][kind] for entry in record["per_rank"]] for kind in KINDS}
    bars = [
        groups.bars(held[kind], name=kind, color=MODALITY[kind], pattern=PATTERN[kind]).update(error_y=None)
        for kind in KINDS
        if any(held[kind])
    ]
    picture = figure(bars, barmode="stack", bargap=0.1, legend=LEGEND, height=320)
    picture.update_xaxes(groups.axis)
    picture.update_yaxes(title_text="tokens held", rangemode="tozero")
    cells = zip(groups.labels, *(groups.cells(held[kind], short) for kind in KINDS), strict=True)
    return Section(
        title="Tokens by modality",
        text="What the tokens of each rank are."
        + (" A bar is the mean of several ranks." if groups.is_grouped else ""),
        pictures=[picture],
        table=table(("rank", *KINDS), cells),
    )


def work_section(record: Mapping, *, cap_bytes: int = 0) -> Section:
    """Show every cost of each rank, the mean, and the cap on memory if there is one (0: none)."""
    groups = RankGroups.of(record["ranks"])
    columns = {field: [entry[field] for entry in record["per_rank"]] for field in COLUMNS}
    pictures = [_cost(record, field, values, groups, cap_bytes) for field, values in columns.items()]
    rows = list(zip(groups.labels, *(groups.cells(values, short) for values in columns.values()), strict=True))
    rows.append(("mean", *(short(sum(values) / len(values)) for values in columns.values())))
    rows.append(("max / mean", *(_ratio(values) for values in columns.values())))
    rows.append(("max / least mean", *(_imbalance(record, field) for field in COLUMNS)))
    cap = f" Dotted: the cap on memory, {short(cap_bytes)} bytes a rank." if cap_bytes else " No cap on memory is set."
    return Section(
        title="Work by rank",
        text="Dashed: the mean of the ranks; beside each name the slowest rank over it. A cost may be even and yet too "
        "high, when work is done twice: the table also has the slowest rank over the least mean any plan could have. "
        f"Step time over its least: {record['makespan_ratio']:.3f}." + cap + (GROUPED if groups.is_grouped else ""),
        pictures=pictures,
        is_small=True,
        table=table(("rank", *COLUMNS.values()), rows),
        is_table_open=record["ranks"] <= 8,
    )


def _cost(record: Mapping, field: str, values: list[float], groups: RankGroups, cap_bytes: int) -> go.Figure:
    title = f"<b>{COLUMNS[field]}</b>  max / mean {_ratio(values)}"
    color = BLUE if field in COST_OF else GREY
    bars = groups.bars(values, name=COLUMNS[field], color=color)
    picture = figure([bars], title=title, height=220, bargap=0.1, showlegend=False)
    picture.update_layout(margin=SMALL_MARGIN)
    mean = sum(values) / len(values)
    picture.add_hline(y=mean, line={"color": VERMILION, "dash": "dash", "width": 2})
    if field == "bytes" and cap_bytes:
        picture.add_hline(y=cap_bytes, line={"color": VERMILION, "dash": "dot", "width": 3}, annotation_text="cap")
    top = max(*values, mean, cap_bytes if field == "bytes" else 0)
    picture.update_xaxes(groups.axis)
    picture.update_yaxes(range=[0, 1.12 * top or 1], title_text=UNITS[field], **ticks(top))
    return picture


def _ratio(values: list[float]) -> str:
    mean = sum(values) / len(values)
    return f"{max(values) / mean:.3f}" if mean else "-"


def _imbalance(record: Mapping, field: str) -> str:
    return f"{record['imbalance'][COST_OF[field]]:.3f}" if field in COST_OF else ""
