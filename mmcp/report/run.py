"""The report of a run folder: shard balance of a real batch, loss curve, accuracy, seconds by stage."""

import json
from pathlib import Path

import plotly.graph_objects as go

from mmcp.report.figures import MARKERS_BELOW, Points, save_accuracy, save_lines, save_shards
from mmcp.report.numbers import decimate, finite, short
from mmcp.report.page import Section, page, table
from mmcp.report.palette import BLUE, GREY, SERIES
from mmcp.report.shards import shard_sections
from mmcp.sharding.plan import ShardPlan
from mmcp.training.stage_clock import STAGES

LOSSES = ("loss", "held_out_loss")
NO_DATA = "No data yet."


def write_run_report(run_folder: Path) -> Path:
    """Write report/index.html and report/*.png from what a run folder holds; return the path of the page.

    Reads metrics.jsonl, eval.json, plan.json and inspect.json; what is missing is said to be missing.
    Raises ValueError when the folder does not exist.
    """
    run_folder = Path(run_folder)
    if not run_folder.is_dir():
        raise ValueError(f"run folder '{run_folder}' does not exist; give the folder that `mmcp train` wrote")
    steps, num_unreadable = _read_lines(run_folder / "metrics.jsonl")
    sections = [
        _overview(steps, num_unreadable),
        _lines_section(run_folder, "Loss", "loss.png", _series(steps, LOSSES), "loss per labelled token"),
        _accuracy_section(run_folder, _read_json(run_folder / "eval.json")),
        _lines_section(run_folder, "Seconds by stage", "seconds.png", _stage_series(steps), "seconds, slowest rank"),
        *_shard_sections(run_folder),
    ]
    path = run_folder / "report" / "index.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(f"Run {run_folder.resolve().name}", sections), encoding="utf-8")
    return path


def _read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _read_lines(path: Path) -> tuple[list[dict], int]:
    """Read a JSONL file: its objects, and how many lines are none (a run that was killed leaves half a line)."""
    steps, num_unreadable = [], 0
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            step = json.loads(line)
        except ValueError:
            step = None
        if isinstance(step, dict):
            steps.append(step)
        elif line.strip():
            num_unreadable += 1
    return steps, num_unreadable


def _series(steps: list[dict], names: tuple[str, ...]) -> dict[str, Points]:
    return {name: finite((step.get("step"), step.get(name)) for step in steps) for name in names}


def _stage_series(steps: list[dict]) -> dict[str, Points]:
    return {
        name: finite((step.get("step"), (step.get("seconds") or {}).get(name)) for step in steps)
        for name in (*STAGES, "total")
    }


def _overview(steps: list[dict], num_unreadable: int) -> Section:
    text = f"{len(steps)} steps logged."
    if num_unreadable:
        text += f" {num_unreadable} lines of metrics.jsonl could not be read and are left out."
    last = steps[-1] if steps else {}
    rows = [(name, short(value)) for name, value in last.items() if isinstance(value, int | float | None)]
    return Section(
        title="The run",
        text=text + (" The last step:" if rows else ""),
        table=table(("quantity", "value"), rows) if rows else "",
        is_table_open=True,
    )


def _lines_section(run_folder: Path, title: str, png: str, series: dict[str, Points], y_label: str) -> Section:
    """Draw curves over steps, as a picture of the page and as a PNG."""
    save_lines(run_folder / "report" / png, series, title=title, x_label="step", y_label=y_label)
    drawn = {name: points for name, points in series.items() if len(points[0])}
    if not drawn:
        return Section(title=title, text=NO_DATA)
    figure = go.Figure()
    for number, (name, points) in enumerate(drawn.items()):
        x, y = decimate(*points)
        mode = "lines+markers" if len(x) <= MARKERS_BELOW else "lines"
        line = {"color": SERIES[number % len(SERIES)]}
        figure.add_trace(go.Scatter(x=x.tolist(), y=y.tolist(), mode=mode, name=name, line=line))
    figure.update_layout(height=360, showlegend=True, legend={"orientation": "h", "y": 1.15})
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text=y_label)
    rows = [
        (name, str(len(y)), short(float(y[0])), short(float(y.min())), short(float(y.max())), short(float(y[-1])))
        for name, (_, y) in drawn.items()
    ]
    absent = [name for name in series if name not in drawn]
    return Section(
        title=title,
        text=f"Not logged: {', '.join(absent)}." if absent else "Over the steps of the run.",
        picture=figure,
        table=table(("series", "points", "first", "least", "most", "last"), rows),
    )


def _accuracy_section(run_folder: Path, results: dict) -> Section:
    """Show the accuracy of each task beside chance, and whatever else the evaluation measured."""
    tasks = results.get("tasks") or {}
    save_accuracy(run_folder / "report" / "accuracy.png", tasks)
    if not tasks:
        return Section(title="Accuracy", text=NO_DATA)
    fields = list(dict.fromkeys(["accuracy", "chance", "n", *(field for task in tasks.values() for field in task)]))
    figure = go.Figure()
    for field, colour in (("accuracy", BLUE), ("chance", GREY)):
        values = [task.get(field) for task in tasks.values()]
        figure.add_trace(go.Bar(x=list(tasks), y=values, name=field, marker_color=colour))
    figure.update_layout(barmode="group", height=340, legend={"orientation": "h", "y": 1.15})
    figure.update_yaxes(range=[0, 1.02], title_text="share of answers right")
    return Section(
        title="Accuracy",
        text="On clips never trained on; chance is the best constant answer.",
        picture=figure,
        table=table(("task", *fields), [(name, *(short(task.get(f)) for f in fields)) for name, task in tasks.items()]),
        is_table_open=True,
    )


def _shard_sections(run_folder: Path) -> list[Section]:
    """Show the first row of the first step, when the run stored its plan and its record."""
    plans, record = _read_json(run_folder / "plan.json").get("rows"), _read_json(run_folder / "inspect.json")
    if not plans or not record:
        return [Section(title="The sequence over the ranks", text=NO_DATA)]
    save_shards(run_folder / "report" / "shards.png", record)
    return shard_sections(record, ShardPlan.from_json(json.dumps(plans[0])), sequence=None)
