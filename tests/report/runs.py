"""Run folders as training writes them, for tests of reports: drawn seconds, with predictions and spans or without."""

import json
from pathlib import Path

import numpy as np

STAGES = ("decode", "wait", "encode", "route", "linear", "attention", "loss", "optimizer")


def write_times(folder: Path, *, ranks: int, steps: int = 12, predicted: bool = True, timeline: bool = True) -> None:
    """Write metrics.jsonl and timeline.jsonl of a run whose stages take 0.01 to 0.2 s."""
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    lines, spans = [], []
    for step in range(steps):
        by_rank = [_seconds(draw) for _ in range(ranks)]
        line = {"step": step, "loss": 3.0 / (1 + step), "seconds": _most(by_rank), "seconds_by_rank": by_rank}
        if predicted:
            guess = [{name: 0.8 * value for name, value in rank.items() if name != "wait"} for rank in by_rank]
            line |= {"predicted": _most(guess), "predicted_by_rank": guess}
        lines.append(line)
        spans.append({"step": step, "ranks": [_spans(rank, began=100.0 + 2 * step) for rank in by_rank]})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if timeline:
        (folder / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in spans))


def _seconds(draw: np.random.Generator) -> dict[str, float]:
    seconds = {name: float(draw.uniform(0.01, 0.2)) for name in STAGES}
    own = sum(value for name, value in seconds.items() if name != "decode")
    return seconds | {"backbone": seconds["linear"] + seconds["attention"], "total": own}


def _most(by_rank: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(rank[name] for rank in by_rank) for name in by_rank[0]}


def _spans(seconds: dict[str, float], *, began: float) -> dict:
    """Two decode jobs side by side, the wait for them, then each stage forward and backward in two micro-batches."""
    spans = [
        ["decode", "worker", None, -1.0, seconds["decode"] / 2],
        ["decode", "worker", None, -1.0, seconds["decode"] / 2],
    ]
    spans.append(["wait", "load", None, -seconds["wait"], seconds["wait"]])
    at = 0.0
    for micro_batch in (0, 1):
        for part, names in (("forward", STAGES[2:-1]), ("backward", STAGES[-2:1:-1])):
            for name in names:
                spans.append([name, part, micro_batch, at, seconds[name] / 4])
                at += seconds[name] / 4
    spans.append(["optimizer", "update", None, at, seconds["optimizer"]])
    return {"began": began, "spans": spans}
