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
    for trace in _shares(edges, kinds):
        figure.add_trace(trace, row=1, col=1)
    owners, encoders = plan.owner[middles].tolist(), _first_encoders(edges, encoder).tolist()
    for row, (values, words) in enumerate(((owners, "held by"), (encoders, "encoded by")), start=2):
        shown = [
            f"{'text, not encoded' if rank == NOT_ENCODED else f'{words} rank {rank}'}<br>{where}"
            for rank, where in zip(values, hover, strict=True)
        ]
        figure.add_trace(_strip(words, edges, values, shown, ranks=plan.ranks), row=row, col=1)
    figure.update_yaxes(fixedrange=True, showgrid=False, ticklabelstandoff=6)
    figure.update_yaxes(range=[0, 1], tickvals=[0.5], ticktext=["modality"], row=1, col=1)
    figure.update_xaxes(showgrid=False, range=[0, max(1, plan.num_tokens)])
    figure.update_xaxes(title_text="token", row=3, col=1)
    figure.update_layout(height=330, legend={"orientation": "h", "y": 1.18, "traceorder": "normal"})
    return Section(
        title="The sequence over the ranks",
        text="The row from its first token to its last: what each token is (where tokens are narrower than a pixel, "
        "the share of each kind), which rank holds it and, for rows of encoders, which rank encodes it. Where the "
        "last two differ, rows are routed. Drag to zoom.",
        picture=figure,
        table=_range_table(plan),
    )


def _shares(edges: np.ndarray, kinds: np.ndarray) -> list[go.Scatter]:
    """Return one area per kind, stacked: its share of the tokens between two edges."""
    traces = []
    for number, kind in enumerate(KINDS):
        before = np.concatenate([[0], np.cumsum(kinds == number)])
        share = np.diff(before[edges]) / np.diff(edges)
        traces.append(
            go.Scatter(
                x=edges.tolist(),
                y=[*share.tolist(), *share[-1:].tolist()],
                name=kind,
                stackgroup="kinds",
                mode="lines",
                line={"width": 0, "shape": "hv"},
                fillcolor=MODALITY[kind],
                hovertemplate=f"{kind} %{{y:.0%}}<extra></extra>",
            )
        )
    return traces


def _first_encoders(edges: np.ndarray, encoder: np.ndarray) -> np.ndarray:
    """Return the rank that encodes the first media token between two edges, NOT_ENCODED where there is none."""
    media = np.append(np.flatnonzero(encoder != NOT_ENCODED), len(encoder))
    first = media[np.searchsorted(media, edges[:-1])]
    return np.where(first < edges[1:], np.append(encoder, NOT_ENCODED)[first], NOT_ENCODED)


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


def _strip(name: str, edges: np.ndarray, values: list[int], hover: list[str], *, ranks: int) -> go.Heatmap:
    """Return one strip coloured by rank; positions that are not encoded stay empty."""
    return go.Heatmap(
        x=edges.tolist(),
        y=[name],
        z=[[None if value == NOT_ENCODED else value for value in values]],
        text=[hover],
        hovertemplate="%{text}<extra></extra>",
        colorscale=RANKS,
        zmin=0,
        zmax=max(1, ranks - 1),
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
