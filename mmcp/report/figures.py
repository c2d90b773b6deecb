"""PNG figures for papers and run folders. Drawn without pyplot, so no display and no backend setting matters."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import EngFormatter

from mmcp.masks import Mask
from mmcp.report.layout_figure import draw_exchanges, draw_ribbon
from mmcp.report.numbers import decimate, is_number
from mmcp.report.palette import BLUE, GREY, MODALITY, SERIES, VERMILION
from mmcp.report.terminal import COLUMNS, COST_OF, ratios
from mmcp.sequence import KINDS
from mmcp.sharding.plan import ShardPlan

MARKERS_BELOW = 60  # points up to which each is marked; a single point would else be invisible

Points = tuple[np.ndarray, np.ndarray]


def save_lines(path: Path, series: Mapping[str, Points], *, title: str, x_label: str, y_label: str) -> None:
    """Draw lines over a common axis; a series without points is left out, no points at all say so."""
    figure, axes = _figure(title)
    drawn = {name: points for name, points in series.items() if len(points[0])}
    for number, (name, points) in enumerate(drawn.items()):
        x, y = decimate(*points)
        marker = "o" if len(x) <= MARKERS_BELOW else None
        axes.plot(x, y, marker=marker, markersize=4, color=SERIES[number % len(SERIES)], label=name)
    axes.set(xlabel=x_label, ylabel=y_label)
    _finish(path, figure, axes, is_empty=not drawn, has_legend=len(drawn) > 1)


def save_accuracy(path: Path, tasks: Mapping[str, Mapping]) -> None:
    """Draw the accuracy of each task beside its chance."""
    figure, axes = _figure("held-out accuracy")
    shown = {name: task for name, task in tasks.items() if is_number(task.get("accuracy"))}
    place = np.arange(len(shown))
    accuracy = [task["accuracy"] for task in shown.values()]
    chance = [task["chance"] if is_number(task.get("chance")) else 0.0 for task in shown.values()]
    axes.bar(place - 0.2, accuracy, 0.4, color=BLUE, label="accuracy")
    axes.bar(place + 0.2, chance, 0.4, color=GREY, label="chance")
    axes.set(xticks=place, ylim=(0, 1.02), ylabel="share of answers right")
    axes.set_xticklabels([_plain(name) for name in shown], rotation=20, ha="right")
    _finish(path, figure, axes, is_empty=not shown, has_legend=True)


def save_bars(
    path: Path,
    groups: Mapping[str, Mapping[str, tuple[float, float | None]]],
    *,
    floor: Mapping[str, float],
    floor_label: str = "",
    title: str,
    y_label: str,
) -> None:
    """Draw the values of several groups side by side, with their deviations.

    groups: by group, name -> (value, standard deviation or None); the names are the same in all groups
    floor:  by name, what is reached without doing anything; drawn as a line, in the legend as `floor_label` if given
    """
    figure, axes = _figure(title)
    names = list(floor)
    wide = 0.8 / max(1, len(groups))
    for number, (group, values) in enumerate(groups.items()):
        place = np.arange(len(names)) - 0.4 + wide * (number + 0.5)
        heights, deviations = zip(*(values[name] for name in names), strict=True) if names else ((), ())
        errors = [deviation or 0.0 for deviation in deviations]
        axes.bar(place, heights, wide, yerr=errors, capsize=3, color=SERIES[number % len(SERIES)], label=_plain(group))
    for number, name in enumerate(names):
        label = "" if number else floor_label
        axes.hlines(floor[name], number - 0.4, number + 0.4, color=GREY, linestyle="--", label=label)
    axes.set(xticks=np.arange(len(names)), ylabel=y_label)
    axes.set_xticklabels([_plain(name) for name in names], rotation=20, ha="right")
    _finish(path, figure, axes, is_empty=not (groups and names), has_legend=True)


def save_shards(path: Path, record: Mapping, plan: ShardPlan, *, mask: Mask | None = None) -> None:
    """Draw a plan: ribbon, tokens and every cost of each rank, rows moved, label rows and, where known, the mask."""
    figure = Figure(figsize=(12, 13), layout="constrained")
    FigureCanvasAgg(figure)
    bands = np.asarray(figure.subfigures(3, 1, height_ratios=[2.2, 6, 4]))
    draw_ribbon(bands[0], plan)
    _draw_work(bands[1], record)
    draw_exchanges(bands[2], plan, mask)
    figure.suptitle(_plain(f"{record['strategy']}: {record['tokens']:,} tokens on {record['ranks']} ranks"))
    _save(path, figure)


def _draw_work(figure: SubFigure, record: Mapping) -> None:
    """Draw tokens by modality and every cost of each rank of an `inspect` record, the mean dashed."""
    per_rank = record["per_rank"]
    grid = figure.subplots(2, 5).flatten()
    below = np.zeros(len(per_rank))
    for kind in KINDS:
        tokens = np.array([entry["by_modality"][kind] for entry in per_rank])
        _bars(grid[0], below + tokens, below, color=MODALITY[kind], label=kind)
        below = below + tokens
    grid[0].set_title("tokens by modality")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(KINDS))
    for axes, (field, heading) in zip(grid[1:], COLUMNS.items(), strict=True):
        values = np.array([float(entry[field]) for entry in per_rank])
        _bars(axes, values, np.zeros(len(values)), color=BLUE if field in COST_OF else GREY)
        axes.axhline(values.mean(), color=VERMILION, linestyle="--")
        imbalance = f"  {record['imbalance'][COST_OF[field]]:.3f}" if field in COST_OF else ""
        axes.set_title(heading + imbalance)
    for axes in grid:
        axes.set_xlabel("rank")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.get_major_locator().set_params(integer=True)


def save_comparison(path: Path, records: Sequence[Mapping]) -> None:
    """Draw step time and each cost of `inspect` records of one row over the least there can be, by strategy."""
    groups = {record["strategy"]: {name: (ratio, None) for name, ratio in ratios(record).items()} for record in records}
    save_bars(
        path,
        groups,
        floor=dict.fromkeys(ratios(records[0]), 1.0),
        floor_label="least there can be",
        title=f"{records[0]['tokens']:,} tokens on {records[0]['ranks']} ranks",
        y_label="slowest rank / least mean",
    )


def _bars(axes: Axes, tops: np.ndarray, bottoms: np.ndarray, *, color: str, label: str = "") -> None:
    """Draw a bar per rank as one path: a thousand ranks are as quick as two."""
    gaps = np.full(len(tops), np.nan)
    half = 0.4 if len(tops) <= 32 else 0.5  # gaps narrower than a pixel would draw patterns that are not there
    edges = (np.arange(len(tops))[:, None] + [-half, half]).ravel()
    heights, floors = (np.stack([values, gaps], axis=1).ravel()[:-1] for values in (tops, bottoms))
    axes.stairs(heights, edges, baseline=floors, fill=True, color=color, label=label)


def _figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(_plain(title))
    axes.grid(alpha=0.3)
    return figure, axes


def _finish(path: Path, figure: Figure, axes: Axes, *, is_empty: bool, has_legend: bool) -> None:
    if is_empty:
        axes.text(0.5, 0.5, "no data", ha="center", va="center", fontsize=20, color=GREY, transform=axes.transAxes)
    elif has_legend:
        axes.legend()
    _save(path, figure)


def _save(path: Path, figure: Figure) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _plain(text: str) -> str:
    """Keep matplotlib from reading a dollar sign as mathematics."""
    return text.replace("$", r"\$")
