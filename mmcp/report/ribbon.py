"""The sequence as a ribbon: what each token is, which rank holds it, which rank encodes it."""

from itertools import pairwise

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from mmcp.report.page import Section, table
from mmcp.report.palette import MODALITY, RANKS
from mmcp.sequence import KINDS, TokenSequence
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import as_indices, size

BINS = 1200  # columns of the ribbon: about the pixels of a screen
ROWS_SHOWN = 64  # ranks listed in the table
NOT_ENCODED = -1


def ribbon_section(plan: ShardPlan, sequence: TokenSequence | None) -> Section:
    """Draw modality, owner and encoder of every token; with the row itself, hovering tells clip times."""
    edges = np.unique(np.linspace(0, plan.num_tokens, min(BINS, plan.num_tokens) + 1).astype(np.int64))
    kinds, encoder = _kinds_and_encoders(plan)
    middles = (edges[:-1] + edges[1:]) // 2
    times = _times(sequence) if sequence is not None else None
    hover = [
        f"tokens {start:,} to {stop - 1:,}" + (f"<br>{_clock(times[middle])}" if times is not None else "")
        for (start, stop), middle in zip(pairwise(edges.tolist()), middles.tolist(), strict=True)
    ]
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.04)
    strips = (
        ("modality", kinds[middles], [KINDS[kind] for kind in kinds[middles]]),
        ("held by", plan.owner[middles], [f"held by rank {rank}" for rank in plan.owner[middles]]),
        ("encoded by", encoder[middles], [_encoded_by(rank) for rank in encoder[middles].tolist()]),
    )
    for row, (name, values, labels) in enumerate(strips, start=1):
        shown = [f"{label}<br>{where}" for label, where in zip(labels, hover, strict=True)]
        figure.add_trace(_strip(name, edges, values, shown, ranks=plan.ranks, is_modality=row == 1), row=row, col=1)
    for kind in KINDS:
        square = {"size": 10, "color": MODALITY[kind], "symbol": "square"}
        figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", marker=square, name=kind), row=1, col=1)
    figure.update_yaxes(fixedrange=True)
    figure.update_xaxes(title_text="token", row=3, col=1)
    figure.update_layout(height=330, legend={"orientation": "h", "y": 1.18})
    return Section(
        title="The sequence over the ranks",
        text="The row from its first token to its last: what each token is, which rank holds it and, for rows of "
        "encoders, which rank encodes it. Where the last two differ, rows are routed. Drag to zoom.",
        picture=figure,
        table=_range_table(plan),
    )


def _kinds_and_encoders(plan: ShardPlan) -> tuple[np.ndarray, np.ndarray]:
    """Tell the kind (index in KINDS) and the encoding rank of each token from the plan's calls: both [s] int64."""
    kinds = np.zeros(plan.num_tokens, dtype=np.int64)
    encoder = np.full(plan.num_tokens, NOT_ENCODED, dtype=np.int64)
    for rank, calls in enumerate(plan.calls):
        for kind, units in calls:
            for unit in as_indices(units).tolist():
                start, stop = plan.unit_ranges[unit]
                kinds[start:stop] = KINDS.index(kind)
                encoder[start:stop] = rank
    return kinds, encoder


def _encoded_by(rank: int) -> str:
    return "text, not encoded" if rank == NOT_ENCODED else f"encoded by rank {rank}"


def _strip(
    name: str, edges: np.ndarray, values: np.ndarray, hover: list[str], *, ranks: int, is_modality: bool
) -> go.Heatmap:
    """Return one coloured strip; positions that are not encoded stay empty."""
    steps = [(index / len(KINDS), (index + 1) / len(KINDS), MODALITY[kind]) for index, kind in enumerate(KINDS)]
    modality = [(position, colour) for low, high, colour in steps for position in (low, high)]
    return go.Heatmap(
        x=edges.tolist(),
        y=[name],
        z=[[None if value == NOT_ENCODED else value for value in values.tolist()]],
        text=[hover],
        hovertemplate="%{text}<extra></extra>",
        colorscale=modality if is_modality else RANKS,
        zmin=-0.5 if is_modality else 0,
        zmax=len(KINDS) - 0.5 if is_modality else max(1, ranks - 1),
        showscale=False,
    )


def _times(sequence: TokenSequence) -> np.ndarray:
    """Seconds on the clip's clock of each token, [s] float64: its unit's start, or its segment's."""
    seconds = sequence.per_token(np.array([float(segment.start) for segment in sequence.segments]))
    for unit, (start, stop) in zip(sequence.units, sequence.unit_ranges.tolist(), strict=True):
        seconds[start:stop] = float(unit.start)
    return seconds


def _clock(seconds: float) -> str:
    return f"clip time {int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{seconds % 60:05.2f}"


def _range_table(plan: ShardPlan) -> str:
    rows = []
    for rank, ranges in list(enumerate(plan.tokens))[:ROWS_SHOWN]:
        shown = ", ".join(f"{start:,} to {stop - 1:,}" for start, stop in ranges[:4])
        more = f" and {len(ranges) - 4} more" if len(ranges) > 4 else ""
        units = size(plan.encode[rank])
        rows.append((str(rank), f"{plan.lengths[rank]:,}", shown + more or "none", f"{units:,}"))
    if plan.ranks > ROWS_SHOWN:
        rows.append((f"and {plan.ranks - ROWS_SHOWN} more", "", "", ""))
    return table(("rank", "tokens", "token ranges", "units encoded"), rows)
