"""Compare finished runs, several seeds of each variant, from what their folders hold; nothing is trained here."""

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from experiments.base import RunConfig, build_model
from experiments.watch import read_watch
from mmcp.config import load
from mmcp.report.figures import save_bars, save_lines
from mmcp.report.numbers import short
from mmcp.training.metrics import read_metrics
from mmcp.training.run_folder import write_json

FIGURES = {
    "loss": "held-out loss",
    "accuracy": "accuracy",
    "tokens_per_second": "tokens/s",
    "flops": "training FLOPs",
    "peak_mb": "peak MiB a rank",
    "parameters": "parameters",
}
"""What is compared, and its heading."""


def compare(runs: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
    """Return {"variants": {name: {figure: {"mean", "std"}, "tasks": {task: {"mean", "std"}}, "curve": [...]}}, ...}.

    runs: by variant, the folders of its seeds, in the same order for all variants
    `std` is the sample standard deviation over seeds, null for a single one; `curve` is the mean loss of each step.
    Raises ValueError when runs of a seed did not see the same tokens.
    """
    measured = {name: [measure(folder) for folder in folders] for name, folders in runs.items()}
    tokens = {tuple(run["tokens"] for run in seeds) for seeds in measured.values()}
    if len(tokens) > 1:
        raise ValueError(f"variants saw different numbers of tokens ({sorted(tokens)}); they cannot be compared")
    variants = {
        name: {
            **{figure: _mean_std([run[figure] for run in seeds]) for figure in FIGURES},
            "tasks": {task: _mean_std([run["tasks"][task] for run in seeds]) for task in seeds[0]["tasks"]},
            "curve": np.mean([run["curve"] for run in seeds], axis=0).tolist(),
        }
        for name, seeds in measured.items()
    }
    first = next(iter(measured.values()))
    return {
        "seeds": len(first),
        "steps": len(first[0]["curve"]),
        "tokens": list(tokens.pop()),
        "chance": first[0]["chance"],
        "variants": variants,
    }


def measure(folder: Path) -> dict[str, Any]:
    """Read one run's figures.

    tokens_per_second is the median step's; peak_mb the largest over ranks and steps, workers included; accuracy the
    share of all held-out questions answered right; flops those of the whole training, forward and backward.
    """
    settings = load(RunConfig, folder / "config.yaml")
    lines, evaluated = read_metrics(folder), json.loads((folder / "eval.json").read_text(encoding="utf-8"))
    tasks = evaluated["tasks"]
    watched = [line for rank in range(settings.mesh.world) for line in read_watch(folder, rank)]
    model = build_model(
        settings.model, vocabulary=settings.tokenizer.build().vocab_size, seed=0, dtype=settings.parameter_dtype
    )
    return {
        "loss": lines[-1]["held_out_loss"],
        "accuracy": sum(task["accuracy"] * task["n"] for task in tasks.values()) / sum(t["n"] for t in tasks.values()),
        "tasks": {name: task["accuracy"] for name, task in tasks.items()},
        "chance": {name: task["chance"] for name, task in tasks.items()},
        "curve": [line["loss"] for line in lines],
        "tokens": sum(line["tokens"] for line in lines),
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in lines),
        "flops": sum(line["flops_per_second"] * line["seconds"]["total"] for line in lines),
        "peak_mb": max(line["pss_mb"] for line in watched),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def write_comparison(folder: Path, record: dict[str, Any]) -> None:
    """Write table.json, table.md, table.csv, loss.png and accuracy.png."""
    write_json(folder / "table.json", record)
    head, rows = _rows(record)
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    (folder / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with (folder / "table.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["variant", "figure", "mean", "std"])
        for name, figure, value in _flat(record):
            writer.writerow([name, figure, value["mean"], "" if value["std"] is None else value["std"]])
    curves = {name: np.array(variant["curve"]) for name, variant in record["variants"].items()}
    series = {name: (np.arange(len(curve), dtype=np.float64), curve) for name, curve in curves.items()}
    title = f"mean of {record['seeds']} seeds"
    save_lines(folder / "loss.png", series, title=title, x_label="step", y_label="loss per labelled token")
    accuracy = {
        name: {task: (value["mean"], value["std"]) for task, value in variant["tasks"].items()}
        for name, variant in record["variants"].items()
    }
    save_bars(
        folder / "accuracy.png",
        accuracy,
        floor=record["chance"],
        floor_label="chance",
        title=title,
        y_label="share of answers right",
    )


def tables(record: dict[str, Any]) -> list[Table]:
    """Lay out the comparison for the terminal."""
    head, rows = _rows(record)
    title = f"{record['seeds']} seeds, {record['steps']} steps, {short(sum(record['tokens']))} tokens a variant"
    table = Table(title=title, caption="mean and standard deviation over seeds")
    for name in head:
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(*row)
    return [table]


def _rows(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and one row per figure, one column per variant; the tasks' accuracies also beside chance."""
    variants = record["variants"].values()
    rows = [[heading, *(_text(each[figure]) for each in variants), ""] for figure, heading in FIGURES.items()]
    for task, chance in record["chance"].items():
        rows.append([f"accuracy: {task}", *(_text(each["tasks"][task]) for each in variants), short(chance)])
    return ["", *record["variants"], "chance"], rows


def _flat(record: dict[str, Any]) -> list[tuple[str, str, dict]]:
    """List (variant, figure, value), the tasks' accuracies as `accuracy/TASK`."""
    found = []
    for name, variant in record["variants"].items():
        found += [(name, figure, variant[figure]) for figure in FIGURES]
        found += [(name, f"accuracy/{task}", value) for task, value in variant["tasks"].items()]
    return found


def _text(value: dict[str, float | None]) -> str:
    mean = short(value["mean"])
    return mean if not value["std"] else f"{mean} +- {short(value['std'])}"


def _mean_std(values: Sequence[float]) -> dict[str, float | None]:
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else None}
