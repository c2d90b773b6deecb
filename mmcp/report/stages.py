"""Predicted beside measured seconds of a run, by stage, by rank and by step."""

import math

import numpy as np
import plotly.graph_objects as go

from mmcp.report.figures import MARKERS_BELOW
from mmcp.report.numbers import decimate, short, ticks
from mmcp.report.page import LEGEND, SMALL_MARGIN, Section, figure, table
from mmcp.report.palette import BLUE, ORANGE
from mmcp.report.rank_groups import GROUPED, HATCH, RankGroups
from mmcp.report.run_record import TOTAL, RunRecord, median, settled

BARS_BESIDE = 16  # ranks up to which two bars stand beside each other
NOT_PREDICTED = " This run did not record what was predicted: measured seconds alone are shown."
NOT_BY_RANK = " This run did not record what was predicted for each rank: measured seconds alone are shown."
BY_RANK = " Hatched or dashed: predicted, each rank's own work without waiting."


def stage_sections(record: RunRecord) -> list[Section]:
    """Show the seconds of each stage over the run, by rank and by step; nothing when none was measured."""
    if not record.stages:
        return []
    return [_by_stage(record), *([_by_rank(record)] if record.ranks else []), _by_step(record)]


def _note(record: RunRecord) -> str:
    return "" if record.has_predictions else NOT_PREDICTED


def _by_stage(record: RunRecord) -> Section:
    stages = (*record.stages, TOTAL)
    measured = [median(settled(record.seconds(stage))) for stage in stages]
    predicted = [median(settled(record.seconds(stage, of="predicted"))) for stage in stages]
    bars = [go.Bar(x=stages, y=_json(measured), name="measured", marker_color=BLUE)]
    if record.has_predictions:
        marker = {"color": ORANGE, "pattern": {"shape": "/", **HATCH}}
        bars.append(go.Bar(x=stages, y=_json(predicted), name="predicted", marker=marker))
    picture = figure(bars, barmode="group", bargap=0.2, legend=LEGEND)
    picture.update_yaxes(title_text="seconds, slowest rank", rangemode="tozero")
    rows = [
        (stage, short(was), short(said), _ratio(was, said))
        for stage, was, said in zip(stages, measured, predicted, strict=True)
    ]
    return Section(
        title="Predicted beside measured, by stage",
        text="Seconds of a step on the slowest rank of each stage, the median over the steps but the first. A rank "
        "that waits for another does so inside the stage that waits." + _note(record),
        pictures=[picture],
        table=table(("stage", "measured s", "predicted s", "measured / predicted"), rows),
        is_table_open=True,
    )


def _by_rank(record: RunRecord) -> Section:
    groups, stages = RankGroups.of(record.ranks), (*record.stages, TOTAL)
    pictures, columns, is_predicted = [], {}, False
    for stage in stages:
        measured = _per_rank(record.by_rank(stage))
        predicted = _per_rank(record.by_rank(stage, of="predicted_by_rank"))
        bars = [groups.bars(_filled(measured), name="measured", color=BLUE)]
        columns[f"{stage}: measured s"] = groups.cells(_filled(measured), short)
        if np.isfinite(predicted).any():
            is_predicted = True
            bars.append(_prediction(groups, _filled(predicted)))
            columns[f"{stage}: predicted s"] = groups.cells(_filled(predicted), short)
        pictures.append(_rank_picture(stage, bars, groups, top=float(max(_filled(measured) + _filled(predicted)))))
    return Section(
        title="Predicted beside measured, by rank",
        text="Seconds of each rank, the median over the last steps."
        + (BY_RANK if is_predicted else NOT_BY_RANK)
        + (GROUPED if groups.is_grouped else ""),
        pictures=pictures,
        is_small=True,
        table=table(("rank", *columns), zip(groups.labels, *columns.values(), strict=True)),
    )


def _prediction(groups: RankGroups, values: list[float]) -> go.Bar | go.Scatter:
    """Draw predictions as bars beside the measured ones, or as steps over them where these are narrow."""
    if len(groups.labels) <= BARS_BESIDE:
        return groups.bars(values, name="predicted", color=ORANGE, pattern="/")
    means = [float(part.mean()) for part in groups.cut(values)]
    line = {"color": ORANGE, "dash": "dash", "width": 2, "shape": "hvh"}
    told = "predicted<br>rank %{text}<br>mean %{y:,.4s}<extra></extra>"
    return go.Scatter(x=groups.middles, y=means, mode="lines", line=line, text=groups.labels, hovertemplate=told)


def _rank_picture(stage: str, bars: list[go.Bar | go.Scatter], groups: RankGroups, *, top: float) -> go.Figure:
    picture = figure(bars, title=f"<b>{stage}</b>", height=220, barmode="group", bargap=0.15, showlegend=False)
    picture.update_layout(margin=SMALL_MARGIN)
    picture.update_xaxes(groups.axis)
    picture.update_yaxes(title_text="seconds", range=[0, 1.12 * top or 1], **ticks(top))
    return picture


def _by_step(record: RunRecord) -> Section:
    numbers = np.array([step.get("step", number) for number, step in enumerate(record.steps)], dtype=np.float64)
    pictures, rows = [], []
    for stage in (*record.stages, TOTAL):
        measured, predicted = record.seconds(stage), record.seconds(stage, of="predicted")
        lines = [
            _line(numbers, measured, "measured", BLUE, "solid"),
            _line(numbers, predicted, "predicted", ORANGE, "dash"),
        ]
        picture = figure([line for line in lines if len(line.x)], title=f"<b>{stage}</b>", height=220, showlegend=False)
        picture.update_layout(margin=SMALL_MARGIN)
        picture.update_xaxes(title_text="step")
        picture.update_yaxes(title_text="seconds", rangemode="tozero")
        pictures.append(picture)
        known = measured[np.isfinite(measured)]
        ratios = measured[predicted > 0] / predicted[predicted > 0]
        least, most = (known.min(), known.max()) if len(known) else (math.nan, math.nan)
        rows.append((stage, short(float(least)), short(median(measured)), short(float(most)), short(median(ratios))))
    return Section(
        title="Predicted beside measured, by step",
        text="Seconds of the slowest rank of each stage over the run; dashed: predicted." + _note(record),
        pictures=pictures,
        is_small=True,
        table=table(("stage", "least s", "median s", "most s", "median of measured / predicted"), rows),
    )


def _line(steps: np.ndarray, values: np.ndarray, name: str, color: str, dash: str) -> go.Scatter:
    known = np.isfinite(values)
    x, y = decimate(steps[known], values[known], limit=800)
    mode = "lines+markers" if len(x) <= MARKERS_BELOW else "lines"
    return go.Scatter(
        x=x.tolist(), y=y.tolist(), name=name, mode=mode, line={"color": color, "dash": dash, "width": 1.5}
    )


def _per_rank(values: np.ndarray) -> np.ndarray:
    """[ranks]: the median of each rank over steps."""
    return np.array([median(settled(column)) for column in values.T], dtype=np.float64)


def _filled(values: np.ndarray) -> list[float]:
    return np.nan_to_num(values).tolist()


def _json(values: list[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _ratio(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.2f}" if predicted > 0 else "-"
