"""`timeline.jsonl`: when each stage of some steps ran on each rank, one line of strict JSON per step."""

import json
from pathlib import Path
from typing import Any

DIGITS = 6  # of seconds: a microsecond


class TimelineWriter:
    """Writes the timelines of a run, those of every `every`-th step; 0: of none."""

    def __init__(self, folder: Path, *, every: int):
        self._path = folder / "timeline.jsonl"
        self._every = every

    def wants(self, step: int) -> bool:
        """Whether this step is written."""
        return bool(self._every) and step % self._every == 0

    def forget(self, step: int) -> None:
        """Drop the lines of this step and later ones, which a resumed run writes again."""
        kept = [line for line in read_timeline(self._path.parent) if line["step"] < step]
        self._path.write_text("".join(map(_as_line, kept)), encoding="utf-8")

    def write(self, step: int, ranks: list[dict[str, Any]]) -> None:
        """Add the line of a step.

        ranks: by rank, {"began": Unix seconds, "spans": [[stage, phase, micro_batch, start, seconds], ...]}
        """
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_as_line({"step": step, "ranks": ranks}))


def read_timeline(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of `timeline.jsonl`; none when there is no file; a last line cut short is left out."""
    path = folder / "timeline.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    return [json.loads(line) for line in lines[:-1]]


def _as_line(entry: dict[str, Any]) -> str:
    ranks = [
        {**rank, "spans": [[*span[:3], *(round(each, DIGITS) for each in span[3:])] for span in rank["spans"]]}
        for rank in entry["ranks"]
    ]
    return json.dumps({**entry, "ranks": ranks}, allow_nan=False) + "\n"
