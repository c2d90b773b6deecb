"""Report files from records and run folders of every state: they parse, hold their parts, fetch nothing, escape text.

Run: python -m pytest tests/report
"""

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from mmcp.masks import Mask
from mmcp.report.figures import save_accuracy, save_comparison, save_lines, save_shards
from mmcp.report.numbers import decimate, finite, short
from mmcp.report.run import write_run_report
from mmcp.report.shards import Shown, View, write_shard_report
from mmcp.report.terminal import COLUMNS, balance_table, comparison_table, ratios
from mmcp.sequence import Segment, TokenSequence
from mmcp.sharding.balance import balance, inspect_record
from mmcp.sharding.cost import row_costs
from mmcp.sharding.step import plan_step
from mmcp.sharding.strategies import STRATEGIES
from tests.sharding.rows import MODEL, media_units

ROW = TokenSequence(
    (
        Segment(kind="text", ids=tuple(range(7))),
        Segment(kind="video", source="a", units=media_units("video", 60, grain=2)),
        Segment(kind="audio", source="a", stream=1, units=media_units("audio", 30)),
        Segment(kind="text", ids=tuple(range(20)), loss=True),
    )
)


def planned(ranks, strategy="balanced", row=ROW):
    costs = row_costs(row, MODEL)
    plan = STRATEGIES[strategy](row, (1, ranks), costs)
    return plan, inspect_record(plan, balance(row, plan, costs), plan_ms=0.25)


class Page(HTMLParser):
    """Collects what a page shows and what it would fetch."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.pictures, self.fetches, self.text, self.headings = [], 0, [], [], "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tables += tag == "table"
        if attributes.get("id", "").startswith("picture-"):
            self.pictures.append(attributes["id"])
        self.fetches += [
            value
            for name, value in attributes.items()
            if name in ("src", "href") and not (value or "").startswith("data:")
        ]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"unbalanced </{tag}>"

    def handle_data(self, data):
        if "script" not in self.open and "style" not in self.open:
            self.text += data
            if self.open and self.open[-1] in ("h1", "h2"):
                self.headings.append(data)


def is_blank(path):
    """Whether the middle of a figure (inside its axes) has nothing darker or more coloured than grid lines."""
    height, width, _ = (image := imread(path)).shape
    inside = image[height // 10 : -height // 6, width // 5 : -width // 5, :3]
    return bool(inside.min() > 0.6)


FACTS = {"sample": "<i>x</i>", "tokens": "many & more"}
OF_PLAN = [
    "The sequence over the ranks",
    "Tokens by modality",
    "Work by rank",
    "Who sends rows to whom",
    "Label rows before and after routing",
]
HEADINGS = [*OF_PLAN, "The mask over the ranks"]


@pytest.mark.parametrize("ranks", [1, 2, 64, 200])
def test_shard_report(tmp_path, ranks):
    plan, record = planned(ranks)
    path = tmp_path / "deep" / "shards.html"
    write_shard_report(path, [View(record, plan)], title="<b>clip & co</b>", facts=FACTS, shown=Shown(sequence=ROW))
    page = Page(path.read_text(encoding="utf-8"))
    assert page.fetches == [] and page.open == []
    assert page.headings == ["<b>clip & co</b>", "What was planned", *HEADINGS]
    assert "<i>x</i>" in page.text and "many & more" in page.text
    assert (len(page.pictures), page.tables) == (15, 7)
    save_shards(tmp_path / "shards.png", record, plan, mask=Mask.of(ROW))
    assert not is_blank(tmp_path / "shards.png")


def test_strategies_side_by_side(tmp_path):
    planned_by = {name: planned(4, name) for name in sorted(STRATEGIES)}
    records = [record for _, record in planned_by.values()]
    path = tmp_path / "compared.html"
    views = [View(record, plan) for plan, record in planned_by.values()]
    write_shard_report(path, views, title="clip", facts=FACTS, shown=Shown())
    page = Page(path.read_text(encoding="utf-8"))
    assert page.fetches == [] and page.open == []
    each = [heading for _ in planned_by for heading in OF_PLAN]
    assert page.headings == ["clip", "What was planned", "Strategies side by side", "Who holds what", *each]
    assert all(f"Strategy {name}" in page.text for name in planned_by)
    save_comparison(tmp_path / "compared.png", records)
    assert not is_blank(tmp_path / "compared.png")
    shown = text_of(comparison_table(records), width=80)
    assert all(f"{name} " in shown for name in planned_by) and "\u2026" not in shown
    assert all(f"{ratio:.3f}" in shown for record in records for ratio in ratios(record).values())


def test_an_empty_row_has_a_report(tmp_path):
    plan, record = planned(2, row=TokenSequence(()))
    path = tmp_path / "shards.html"
    write_shard_report(path, [View(record, plan)], title="nothing", facts={}, shown=Shown(sequence=TokenSequence(())))
    save_shards(tmp_path / "shards.png", record, plan, mask=Mask.of(TokenSequence(())))
    assert len(Page(path.read_text(encoding="utf-8")).pictures) == 14


def text_of(table, width):
    console = Console(width=width, record=True, file=StringIO())
    console.print(table)
    return console.export_text()


@pytest.mark.parametrize("ranks", [1, 4, 100])
def test_terminal_table_shows_every_cost(ranks):
    text = text_of(balance_table(planned(ranks)[1]), width=80)
    assert all(heading in text for heading in COLUMNS.values()) and "\u2026" not in text
    assert "imbalance" in text and f"{ranks} ranks" in text
    assert text.count("\n") < 50


NAN = float("nan")
SERIES = {
    "one point": [(3, 2.5)],
    "constant": [(step, 1.0) for step in range(20)],
    "long": [(step, np.sin(step / 3000)) for step in range(100_000)],
    "no points": [],
    "all missing": [(step, None) for step in range(5)],
    "not a number": [(step, NAN) for step in range(5)],
}


@pytest.mark.parametrize("name", SERIES)
def test_no_line_figure_is_blank(tmp_path, name):
    path = tmp_path / "figures" / "lines.png"
    save_lines(path, {name: finite(SERIES[name])}, title=name, x_label="step", y_label="$ & %")
    assert not is_blank(path)


def test_no_accuracy_figure_is_blank(tmp_path):
    save_accuracy(tmp_path / "a.png", {"colour $x": {"accuracy": 0.9, "chance": 0.2}, "order": {"accuracy": None}})
    save_accuracy(tmp_path / "b.png", {})
    assert not is_blank(tmp_path / "a.png") and not is_blank(tmp_path / "b.png")


def test_decimation_keeps_peaks():
    y = np.zeros(100_000)
    y[77_777] = 9.0
    x, kept = decimate(np.arange(100_000.0), y, limit=500)
    assert len(kept) <= 502 and kept.max() == 9.0 and x[kept.argmax()] == 77_777


def test_short_numbers():
    shown = [short(value) for value in (0, 12, 999, 999_600, 1_234_567, 0.00123, 2.0e12, None, NAN, "softmax")]
    assert shown == ["0", "12", "999", "1M", "1.23M", "0.00123", "2T", "-", "-", "softmax"]


def write_run(folder: Path, *, steps, tasks, with_plan):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    if tasks is not None:
        (folder / "eval.json").write_text(json.dumps({"tasks": tasks, "checkpoint": "x", "ranks": 2}))
    if with_plan:
        plan, record = planned(2)
        step = plan_step([ROW], groups=1, plan_row=lambda row: plan, cost=lambda row: row.num_tokens)
        (folder / "plan.json").write_text(step.to_json())
        (folder / "inspect.json").write_text(json.dumps(record))


STEP = {"step": 0, "loss": 2.0, "seconds": {"decode": 0.5, "total": 1.0}, "held_out_loss": None, "lr": 1e-3}
TASKS = {"<script>colour": {"accuracy": 0.93, "chance": 0.17, "n": 100}, "when": {"median_error": 1.5, "n": 100}}
RUNS = {
    "nothing": ([], None, False),
    "one step": ([STEP], TASKS, True),
    "missing series": ([{"step": 0}, {"step": 1, "loss": 1.0}], {}, True),
    "not a number": ([{**STEP, "step": step, "loss": NAN} for step in range(4)], TASKS, False),
    "constant": ([{**STEP, "step": step} for step in range(30)], TASKS, True),
    "long": ([{"step": step, "loss": 2 + np.cos(step / 9000)} for step in range(100_000)], TASKS, True),
}


@pytest.mark.parametrize("name", RUNS)
def test_run_report(tmp_path, name):
    steps, tasks, with_plan = RUNS[name]
    folder = tmp_path / "my <run>"
    write_run(folder, steps=steps, tasks=tasks, with_plan=with_plan)
    path = write_run_report(folder)
    assert path == folder / "report" / "index.html"
    page = Page(path.read_text(encoding="utf-8"))
    assert page.fetches == [] and page.open == []
    assert page.headings[:5] == ["Run my <run>", "The run", "Loss", "Accuracy", "Seconds by stage"]
    assert f"{len(steps)} steps logged" in page.text
    assert ("held by rank" in path.read_text(encoding="utf-8")) == with_plan
    assert path.stat().st_size < 7_000_000
    for png in (folder / "report").glob("*.png"):
        assert not is_blank(png)
    names = {png.stem for png in (folder / "report").glob("*.png")}
    assert names == {"loss", "accuracy", "seconds"} | ({"shards"} if with_plan else set())


def test_half_a_line_is_counted(tmp_path):
    write_run(tmp_path / "run", steps=[STEP], tasks=None, with_plan=False)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "lo')
    assert "1 lines of metrics.jsonl could not be read" in write_run_report(tmp_path / "run").read_text()


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist; give the folder"):
        write_run_report(tmp_path / "absent")


@pytest.mark.parametrize("backend", [None, "TkAgg"])
def test_no_display_is_needed(tmp_path, backend):
    write_run(tmp_path / "run", steps=[STEP], tasks=TASKS, with_plan=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "MPLBACKEND")}
    environment |= {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])} | (
        {"MPLBACKEND": backend} if backend else {}
    )
    code = "import sys; from mmcp.report.run import write_run_report; write_run_report(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], env=environment, check=True, timeout=60)
    assert (tmp_path / "run" / "report" / "loss.png").stat().st_size > 1000
