"""The report of a run folder: loss curve, accuracy, predicted beside measured seconds, timeline, and a real batch."""

import json
from pathlib import Path

import plotly.graph_objects as go

from mmcp.report.figures import MARKERS_BELOW, Points, save_accuracy, save_lines, save_shards
from mmcp.report.numbers import decimate, finite, short
from mmcp.report.page import LEGEND, Section, figure, page, table
from mmcp.report.palette import BLUE, GREY, SERIES
from mmcp.report.run_record import TOTAL, RunRecord
from mmcp.report.shards import ROW, Shown, View, shard_sections
from mmcp.report.stages import stage_sections
from mmcp.report.timeline import timeline_sections
from mmcp.sharding.plan import ShardPlan

LOSSES = ("loss", "held_out_loss")
NO_DATA = "No data yet."
DASHES = ("solid", "dash", "dot")


def write_run_report(run_folder: Path) -> Path:
    """Write report/index.html and report/*.png from what a run folder holds; return the path of the page.

    Reads metrics.jsonl, timeline.jsonl, eval.json, plan.json and inspect.json; what is missing is said to be missing.
    Raises ValueError when the folder does not exist.
    """
    run_folder = Path(run_folder)
    if not run_folder.is_dir():
        raise ValueError(f"run folder '{run_folder}' does not exist; give the folder that `mmcp train` wrote")
    record = RunRecord.read(run_folder)
    shards, data = _shard_sections(run_folder)
    sections = [
        _overview(record),
        _lines_section(run_folder, "Loss", "loss.png", _series(record.steps, LOSSES), "loss per labelled token"),
        _accuracy_section(run_folder, _read_json(run_folder / "eval.json")),
        _lines_section(run_folder, "Seconds by stage", "seconds.png", _stage_series(record), "seconds, slowest rank"),
        *time_sections(record),
        *shards,
    ]
    path = run_folder / "report" / "index.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(f"Run {run_folder.resolve().name}", sections, data=data), encoding="utf-8")
    return path


def time_sections(record: RunRecord) -> list[Section]:
    """Show what a run took: seconds predicted and measured, and a timeline."""
    return [*stage_sections(record), *timeline_sections(record)]


def _read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _series(steps: list[dict], names: tuple[str, ...]) -> dict[str, Points]:
    return {name: finite((step.get("step"), step.get(name)) for step in steps) for name in names}


def _stage_series(record: RunRecord) -> dict[str, Points]:
    return {
        name: finite((step.get("step"), (step.get("seconds") or {}).get(name)) for step in record.steps)
        for name in (*record.stages, TOTAL)
    }


def _overview(record: RunRecord) -> Section:
    steps = record.steps
    text = f"{len(steps)} steps logged."
    if record.num_unreadable:
        text += f" {record.num_unreadable} lines of metrics.jsonl could not be read and are left out."
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
    picture = figure(legend=LEGEND, height=360)
    for number, (name, points) in enumerate(drawn.items()):
        x, y = decimate(*points)
        mode = "lines+markers" if len(x) <= MARKERS_BELOW else "lines"
        line = {"color": SERIES[number % len(SERIES)], "dash": DASHES[number // len(SERIES) % len(DASHES)]}
        picture.add_trace(go.Scatter(x=x.tolist(), y=y.tolist(), mode=mode, name=name, line=line))
    picture.update_layout(showlegend=True)
    picture.update_xaxes(title_text="step")
    picture.update_yaxes(title_text=y_label)
    rows = [
        (name, str(len(y)), short(float(y[0])), short(float(y.min())), short(float(y.max())), short(float(y[-1])))
        for name, (_, y) in drawn.items()
    ]
    absent = [name for name in series if name not in drawn]
    return Section(
        title=title,
        text=f"Not logged: {', '.join(absent)}." if absent else "Over the steps of the run.",
        pictures=[picture],
        table=table(("series", "points", "first", "least", "most", "last"), rows),
    )


def _accuracy_section(run_folder: Path, results: dict) -> Section:
    """Show the accuracy of each task beside chance, and whatever else the evaluation measured."""
    tasks = results.get("tasks") or {}
    save_accuracy(run_folder / "report" / "accuracy.png", tasks)
    if not tasks:
        return Section(title="Accuracy", text=NO_DATA)
    fields = list(dict.fromkeys(["accuracy", "chance", "n", *(field for task in tasks.values() for field in task)]))
    picture = figure(barmode="group", legend=LEGEND)
    for field, colour in (("accuracy", BLUE), ("chance", GREY)):
        values = [task.get(field) for task in tasks.values()]
        picture.add_trace(go.Bar(x=list(tasks), y=values, name=field, marker_color=colour))
    picture.update_yaxes(range=[0, 1.02], title_text="share of answers right")
    return Section(
        title="Accuracy",
        text="On clips never trained on; chance is the best constant answer.",
        pictures=[picture],
        table=table(("task", *fields), [(name, *(short(task.get(f)) for f in fields)) for name, task in tasks.items()]),
        is_table_open=True,
    )


def _shard_sections(run_folder: Path) -> tuple[list[Section], dict]:
    """Show the first row of the first step, when the run stored its plan and its record; and the data that needs."""
    plans, record = _read_json(run_folder / "plan.json").get("rows"), _read_json(run_folder / "inspect.json")
    if not plans or not record:
        return [Section(title="The sequence over the ranks", text=NO_DATA)], {}
    plan, shown = ShardPlan.from_json(json.dumps(plans[0])), Shown()
    save_shards(run_folder / "report" / "shards.png", record, plan)
    return shard_sections(View(record, plan), shown), {ROW: shown.data(plan)}
