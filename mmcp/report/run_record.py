"""What a run folder tells of time: seconds of each stage, rank and step, measured and predicted, and when each ran."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mmcp.report.numbers import is_number

ORDER = ("decode", "wait", "encode", "route", "backbone", "linear", "attention", "loss", "optimizer")
TOTAL = "total"


@dataclass(frozen=True)
class RunRecord:
    """The lines of `metrics.jsonl` and `timeline.jsonl`; what a line lacks is not a number."""

    steps: list[dict[str, Any]]
    num_unreadable: int
    """Lines of metrics.jsonl that are no objects: a run that was killed leaves half a line."""
    timeline: list[dict[str, Any]]

    @staticmethod
    def read(folder: Path) -> "RunRecord":
        """Read what there is; a file that is not there has no lines."""
        steps, num_unreadable = read_lines(folder / "metrics.jsonl")
        return RunRecord(steps, num_unreadable, read_lines(folder / "timeline.jsonl")[0])

    @cached_property
    def stages(self) -> tuple[str, ...]:
        """Stages that were measured, in the order they run; `backbone` only where it is not told in parts."""
        found = {name for step in self.steps for name in (step.get("seconds") or {})}
        found -= {"backbone"} if {"linear", "attention"} & found else set()
        return tuple(name for name in ORDER if name in found)

    @cached_property
    def ranks(self) -> int:
        """Ranks whose seconds are told; 0: none."""
        return max((len(step.get("seconds_by_rank") or ()) for step in self.steps), default=0)

    @cached_property
    def has_predictions(self) -> bool:
        return any(is_number(value) for step in self.steps for value in (step.get("predicted") or {}).values())

    def seconds(self, stage: str, *, of: str = "seconds") -> np.ndarray:
        """[steps] float64: seconds of the slowest rank; `of` names the field, `seconds` or `predicted`."""
        return np.array([_number((step.get(of) or {}).get(stage)) for step in self.steps], dtype=np.float64)

    def by_rank(self, stage: str, *, of: str = "seconds_by_rank", last: int = 200) -> np.ndarray:
        """[steps, ranks] float64: the last steps; `of` names the field, `seconds_by_rank` or `predicted_by_rank`."""
        told = [step.get(of) or [] for step in self.steps[-last:]]
        rows = [[_number(rank.get(stage)) for rank in step] for step in told if len(step) == self.ranks]
        return np.array(rows, dtype=np.float64).reshape(-1, self.ranks)


def read_lines(path: Path) -> tuple[list[dict], int]:
    """Read a JSONL file: its objects, and how many lines are none."""
    found, num_unreadable = [], 0
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append(value)
        elif line.strip():
            num_unreadable += 1
    return found, num_unreadable


def median(values: np.ndarray) -> float:
    """Median of the numbers among `values`; not a number when there is none."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")


def settled(values: np.ndarray) -> np.ndarray:
    """Leave the first step out, in which memory is taken and kernels are made, where there are others."""
    return values[1:] if len(values) > 1 else values


@dataclass(frozen=True)
class Span:
    """One stretch of time of one rank."""

    rank: int
    stage: str
    part: str
    """forward, backward, update, load or worker; empty where stages are laid end to end."""
    micro_batch: int | None
    start: float
    """Seconds since the step began on the first rank."""
    seconds: float


def step_spans(record: RunRecord) -> tuple[dict[int, list[Span]], bool]:
    """Return the spans of each step, and whether they were timed.

    Without a timeline only durations are known: a step's stages then lie end to end, in their order, and decoding,
    which runs beside the step before, ends where its step begins.
    """
    timed = {line["step"]: _timed(line["ranks"]) for line in record.timeline if "step" in line and line.get("ranks")}
    if timed:
        return timed, True
    laid = {
        step.get("step", number): _laid(step.get("seconds_by_rank") or [], record.stages)
        for number, step in enumerate(record.steps)
    }
    return laid, False


def _timed(ranks: Sequence[dict[str, Any]]) -> list[Span]:
    first = min(rank["began"] for rank in ranks)
    return [
        Span(number, stage, part, micro_batch, rank["began"] - first + start, seconds)
        for number, rank in enumerate(ranks)
        for stage, part, micro_batch, start, seconds in rank["spans"]
    ]


def _laid(ranks: Sequence[dict[str, Any]], stages: Sequence[str]) -> list[Span]:
    spans = []
    for number, seconds in enumerate(ranks):
        at = 0.0
        for stage in stages:
            taken = seconds.get(stage)
            if not is_number(taken) or taken <= 0:
                continue
            if stage == "decode":
                spans.append(Span(number, stage, "worker", None, -taken, taken))
            else:
                spans.append(Span(number, stage, "", None, at, taken))
                at += taken
    return spans


def _number(value: object) -> float:
    return float(value) if is_number(value) else float("nan")
