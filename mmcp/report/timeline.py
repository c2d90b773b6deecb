"""When each stage ran on each rank: a picture of a few steps, and a trace of all for Perfetto or chrome://tracing."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from mmcp.report.numbers import short
from mmcp.report.page import LEGEND, Section, figure, table
from mmcp.report.palette import BLUE, GREEN, GREY, ORANGE, PINK, SKY, VERMILION
from mmcp.report.rank_groups import HATCH, RankGroups
from mmcp.report.run_record import RunRecord, Span, step_spans

STEPS_SHOWN = 3
AHEAD_SHOWN = 0.4  # of a step's length that is shown of what ran before it
LANES = 32  # ranks of a picture
MOST_BARS = 4000  # of a picture
MOST_EVENTS = 1_000_000  # of a trace: about 100 MB
COLOURS = {
    "decode": (ORANGE, "/"),
    "wait": (GREY, "."),
    "encode": (GREEN, ""),
    "route": (PINK, "x"),
    "backbone": (BLUE, ""),
    "linear": (BLUE, ""),
    "attention": (SKY, "\\"),
    "loss": (VERMILION, ""),
    "optimizer": (GREY, ""),
}
LAID = (
    " Only durations were recorded: the stages of a step are laid end to end, and decoding ends where its step begins."
)


def timeline_sections(record: RunRecord) -> list[Section]:
    """Show the last steps of a run on a common clock; nothing when no rank's time was told."""
    spans, is_timed = step_spans(record)
    steps = [step for step in sorted(spans) if spans[step]][-STEPS_SHOWN:]
    if not steps:
        return []
    lanes = _lanes(spans[steps[-1]])
    pictures = [_picture(spans[step], step, lanes) for step in steps]
    rows = [row for step in steps for row in _rows(step, spans[step])]
    every = (
        ""
        if len(lanes) == 1 + max(span.rank for span in spans[steps[-1]])
        else (
            f" Of {1 + max(span.rank for span in spans[steps[-1]])} ranks, {len(lanes)} are drawn: of each group of "
            "neighbours the one that takes longest."
        )
    )
    return [
        Section(
            title="Timeline",
            text="When each stage ran on each rank, in the last steps; the thin bars are decoding on the rank's "
            "workers, beside its steps; what ran far ahead lies to the left, click twice to see it. "
            "`mmcp inspect RUN --trace FILE` writes all of them for Perfetto." + ("" if is_timed else LAID) + every,
            pictures=pictures,
            table=table(("step", "stage", "least s", "mean s", "most s", "slowest rank"), rows),
        )
    ]


def _lanes(spans: Sequence[Span]) -> list[int]:
    """Choose the ranks to draw: all, or of each group of neighbours the one whose own work takes longest."""
    busy: dict[int, float] = defaultdict(float)
    for span in spans:
        busy[span.rank] += 0.0 if span.part == "worker" else span.seconds
    ranks = max(busy) + 1
    most = max(1, min(LANES, MOST_BARS * ranks // len(spans)))
    edges = RankGroups.of(ranks, most).edges
    return [max(range(low, high), key=lambda rank: busy[rank]) for low, high in pairwise(edges)]


def _picture(spans: Sequence[Span], step: int, lanes: Sequence[int]) -> go.Figure:
    place = {rank: number for number, rank in enumerate(lanes)}
    by_stage: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.rank in place:
            by_stage[span.stage].append(span)
    bars = []
    for stage, (color, pattern) in COLOURS.items():
        own = by_stage.get(stage, [])
        if not own:
            continue
        is_beside = [span.part == "worker" for span in own]
        told = [
            f"rank {span.rank}: <b>{stage}</b> {span.part}"
            + ("" if span.micro_batch is None else f", micro-batch {span.micro_batch}")
            + f"<br>{span.seconds:.4g} s from {span.start:.4g} s on"
            for span in own
        ]
        bars.append(
            go.Bar(
                orientation="h",
                y=[place[span.rank] + (0.34 if beside else -0.1) for span, beside in zip(own, is_beside, strict=True)],
                base=[round(span.start, 6) for span in own],
                x=[round(span.seconds, 6) for span in own],
                width=[0.18 if beside else 0.6 for beside in is_beside],
                name=stage,
                marker={"color": color, "line": {"width": 0}, "pattern": {"shape": pattern, **HATCH}},
                hovertext=told,
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )
    picture = figure(bars, title=f"step {step}", height=150 + 26 * max(2, len(lanes)), barmode="overlay", legend=LEGEND)
    picture.update_layout(
        margin={"l": 55, "r": 10, "t": 95, "b": 45}, title_yref="container", title_y=0.98, title_yanchor="top"
    )
    end = max(span.start + span.seconds for span in spans)
    picture.update_xaxes(title_text="seconds since the step began", range=[-AHEAD_SHOWN * end, 1.02 * end])
    picture.update_yaxes(
        title_text="rank", tickvals=list(range(len(lanes))), ticktext=list(map(str, lanes)), showgrid=False,
        range=[len(lanes) - 0.4, -0.6], zeroline=False,
    )  # fmt: skip
    return picture


def _rows(step: int, spans: Sequence[Span]) -> Iterator[tuple[str, ...]]:
    for stage in COLOURS:
        by_rank: dict[int, float] = defaultdict(float)
        for span in spans:
            if span.stage == stage:
                by_rank[span.rank] += span.seconds
        if by_rank:
            values = list(by_rank.values())
            slowest = max(by_rank, key=lambda rank: by_rank[rank])
            mean = sum(values) / len(values)
            yield str(step), stage, short(min(values)), short(mean), short(max(values)), str(slowest)


def write_trace(path: Path, record: RunRecord) -> dict[str, str]:
    """Write the steps of a run as Chrome trace events, one process for each rank; return what was written in words.

    Raises ValueError when the run recorded no seconds by rank.
    """
    spans, is_timed = step_spans(record)
    steps = [step for step in sorted(spans) if spans[step]]
    if not steps:
        raise ValueError(f"--trace {path}: the run holds no seconds by rank; train at least one step")
    kept: list[int] = []
    count = 0
    for step in reversed(steps):
        count += len(spans[step])
        if kept and count > MOST_EVENTS:
            break
        kept.append(step)
    starts = _starts(record, spans, is_timed)
    events = [event for step in reversed(kept) for event in _events(step, spans[step], starts[step])]
    _part_workers(events)
    ranks = sorted({event["pid"] for event in events})
    told = {"times": "measured" if is_timed else LAID.strip(), "steps": f"{kept[-1]} to {kept[0]}"}
    text = {"traceEvents": [*_names(ranks), *events], "displayTimeUnit": "ms", "otherData": told}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(text, allow_nan=False, separators=(",", ":")), encoding="utf-8")
    left_out = f", {len(steps) - len(kept)} earlier ones left out" if len(kept) < len(steps) else ""
    return {"trace": f"{path}: {len(events):,} spans of steps {told['steps']} on {len(ranks)} ranks{left_out}"}


def _starts(record: RunRecord, spans: dict[int, list[Span]], is_timed: bool) -> dict[int, float]:
    """By step: when it began, in seconds since the first."""
    if is_timed:
        began = {
            line["step"]: min(rank["began"] for rank in line["ranks"])
            for line in record.timeline
            if line["step"] in spans
        }
        first = min(began.values())
        return {step: at - first for step, at in began.items()}
    starts, at = {}, 0.0
    for step in sorted(spans):
        starts[step] = at
        at += max((span.start + span.seconds for span in spans[step]), default=0.0)
    return starts


def _events(step: int, spans: Sequence[Span], start: float) -> Iterator[dict[str, Any]]:
    for span in spans:
        told = {"step": step} | ({} if span.micro_batch is None else {"micro_batch": span.micro_batch})
        yield {
            "name": f"{span.stage} {span.part}".strip(),
            "cat": span.stage,
            "ph": "X",
            "ts": round(1e6 * (start + span.start), 3),
            "dur": round(1e6 * span.seconds, 3),
            "pid": span.rank,
            "tid": int(span.part == "worker"),  # 0: the step; from 1 on: decoding, see _part_workers
            "args": told,
        }


def _part_workers(events: Sequence[dict[str, Any]]) -> None:
    """Move decoding jobs that overlap on a rank to threads of their own: viewers want events of a thread nested."""
    free: dict[int, list[float]] = defaultdict(list)
    for event in sorted((event for event in events if event["tid"]), key=lambda event: event["ts"]):
        ends = free[event["pid"]]
        lane = next((lane for lane, end in enumerate(ends) if end <= event["ts"]), len(ends))
        ends[lane : lane + 1] = [event["ts"] + event["dur"]]
        event["tid"] = 1 + lane


def _names(ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    for rank in ranks:
        yield {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        yield {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        for tid, name in enumerate(("step", "decoding beside it")):
            yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}}
