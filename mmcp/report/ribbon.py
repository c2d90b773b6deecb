"""The sequence as a ribbon: what each token is, which rank holds it, which rank encodes it."""

from typing import Any

import numpy as np
from plotly.colors import sample_colorscale

from mmcp.report.page import Ribbon, Section, table
from mmcp.report.palette import MODALITY, PATTERN, SCALE
from mmcp.report.row_pieces import plan_row_data, runs
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import as_indices, size

MOST_RUNS = 4000  # ranges of one rank that are told exactly
ROWS_SHOWN = 64  # ranks listed in the table
SHADES = 64


def ribbon_section(plan: ShardPlan, row: str) -> Section:
    """Show modality, owner and encoder of every token; `row` names the page's data about the row."""
    return Section(
        title="The sequence over the ranks",
        text="The row from its first token to its last: what each token is (where tokens are narrower than a pixel, "
        "the share of each kind), which rank holds it and, for rows of encoders, which rank encodes it. Where the "
        "last two differ, rows are routed. Drag to zoom in, click twice to zoom out; pointing at a stretch tells its "
        "frames, clip time, text and costs, decoding and encoding it alone, forward.",
        pictures=[Ribbon(row=row, plan=plan_data(plan))],
        table=_range_table(plan),
    )


def plan_data(plan: ShardPlan) -> dict[str, Any]:
    """Return what `ribbon.js` tells of a plan."""
    shades = [number / (SHADES - 1) for number in range(SHADES)]
    tracks = {}
    for name, ranks in (("owner", plan.owner), ("encoder", plan.encoder)):
        starts, values, is_sampled = runs(ranks, MOST_RUNS)
        tracks[name] = {"start": starts, "rank": values, "sampled": is_sampled}
    colours = {"kinds": MODALITY, "patterns": PATTERN, "ranks": sample_colorscale(SCALE, shades)}
    return {"ranks": plan.ranks, "colours": colours, **tracks}


def row_of_plan(plan: ShardPlan) -> dict[str, Any]:
    """Return what is known of a row by its plan alone."""
    kinds = {unit: kind for calls in plan.calls for kind, units in calls for unit in as_indices(units).tolist()}
    return plan_row_data(plan.num_tokens, kinds, plan.unit_ranges)


def _range_table(plan: ShardPlan) -> str:
    rows = []
    for rank, ranges in list(enumerate(plan.tokens))[:ROWS_SHOWN]:
        shown = ", ".join(f"{start:,} to {stop - 1:,}" for start, stop in ranges[:4])
        more = f" and {len(ranges) - 4:,} more" if len(ranges) > 4 else ""
        units = size(plan.encode[rank])
        rows.append((str(rank), f"{plan.lengths[rank]:,}", shown + more or "none", f"{units:,}"))
    if plan.ranks > ROWS_SHOWN:
        rest = plan.lengths[ROWS_SHOWN:]
        counts = f"{min(rest):,} to {max(rest):,} (mean {np.mean(rest):,.1f})"
        rows.append((f"{ROWS_SHOWN} to {plan.ranks - 1}", counts, "", ""))
    return table(("rank", "tokens", "token ranges", "units encoded"), rows)
